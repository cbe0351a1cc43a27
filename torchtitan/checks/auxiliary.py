"""Checks of auxiliary losses."""

from collections.abc import Iterator

from torchtitan.auxiliary_losses import AuxiliaryLossConfig, ModelLossConfig, MultiToken, ZLoss
from torchtitan.checks.model import RecipeModel, model_of
from torchtitan.config import PlannedWorld, Problem
from torchtitan.expert_loads import routers
from torchtitan.job import JobConfig
from torchtitan.models.output import auxiliary_losses
from torchtitan.tasks import TASKS
from torchtitan.torch_private.compiler import can_count_once_where_recomputed

SECTIONS = ("auxiliary_losses", "model", "loss", "compile", "sharding", "parallelism")


def losses(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that each loss is given once, and possible with this model and layout."""
    model, seen = model_of(job), dict[str, int]()
    for number, config in enumerate(job.auxiliary_losses):
        key = f"auxiliary_losses.{number}"
        if config.name in seen:
            message = (
                f"auxiliary_losses.{seen[config.name]} has the same name; remove one of the two"
            )
            yield Problem(f"{key}.name", message)
        seen.setdefault(config.name, number)
        if model is None:
            continue
        for reason in conflicts(config, job, model) if config.reported else ():
            yield Problem(f"{key}.name", reason, SECTIONS)
        if isinstance(config, ModelLossConfig) and not config.is_on:
            message = "with weight 0 it is not part of the model, and not reported"
            yield Problem(f"{key}.weight", message, SECTIONS, "note")


def block_losses(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that losses of a model's own blocks are summed once, also with recomputation."""
    model, recompute = model_of(job), job.activation_checkpoint
    if model is None or not (recompute.every or recompute.by_operator):
        return
    if not job.compile.compiles("model"):
        return
    if has_block_losses(model) and not can_count_once_where_recomputed():
        message = (
            f"this version of torch cannot compile the blocks of {job.model.name}, whose "
            'sums would also count recomputations; use activation_checkpoint.mode = "none", or '
            "torch 2.13"
        )
        yield Problem("compile.enable", message, (*SECTIONS, "activation_checkpoint"))


def has_block_losses(model: RecipeModel) -> bool:
    """Whether the blocks of a model have losses of their own, or experts, which are counted."""
    blocks = model.spec.blocks(model.empty()).values()
    return any(auxiliary_losses(block) or routers(block) for block in blocks)


def conflicts(config: AuxiliaryLossConfig, job: JobConfig, model: RecipeModel) -> Iterator[str]:
    """Find reasons against a loss, each with a remedy."""
    task, chunk = TASKS[model.spec.task], job.loss.vocabulary_chunk
    in_one = job.compile.compiles("model") and job.compile.granularity == "model"
    is_inside = chunk or not isinstance(config, ZLoss)  # in the model, not from its outputs
    if in_one and is_inside and (config.warmup_steps or config.decay_steps):
        yield (
            "its weight is a constant of the graph of the whole model, which would be "
            'compiled again for each value; use compile.granularity = "block", or a weight '
            "that changes at once: warmup_steps = 0, decay_steps = 0"
        )
    if isinstance(config, ZLoss):
        if not task.has_logits:
            yield f"the outputs of the task {model.spec.task} are not logits; remove this loss"
        if chunk and job.sharding.never_whole:
            yield (
                f'with sharding.name = "{job.sharding.name}" no rank has whole rows of logits '
                'when they are computed in chunks; use sharding.name = "fsdp2", or '
                "loss.vocabulary_chunk = 0"
            )
        return
    assert isinstance(config, ModelLossConfig)
    if not config.is_in(model.args):
        yield f"{job.model.name} does not support this loss; remove it"
        return
    if isinstance(config, MultiToken):
        yield from _depth_conflicts(config, job)


def _depth_conflicts(config: MultiToken, job: JobConfig) -> Iterator[str]:
    if not job.loss.vocabulary_chunk:
        yield (
            "each depth would hold as many logits as the model; use loss.vocabulary_chunk "
            "above 0, such as 8192"
        )
    if config.depth >= job.training.seq_len:
        yield (
            f"no token of a sequence of {job.training.seq_len} is followed by {config.depth} "
            "more; use a smaller depth"
        )
