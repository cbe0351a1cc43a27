"""Checks that the model exists, fits its tokenizer and can be sharded, and its auxiliary losses."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from torchtitan.checks.divisibility import DEGREES, SHARD, alternatives, divisors
from torchtitan.config import (
    ConfigError,
    Gathered,
    KeyPath,
    PlannedWorld,
    Problem,
    Setting,
    allowed_names,
    nearest,
)
from torchtitan.data import DATASETS, load_tokenizer
from torchtitan.expert_loads import routers
from torchtitan.job import JobConfig
from torchtitan.losses import AuxiliaryLossConfig, ModelLossConfig, MultiToken, ZLoss
from torchtitan.models import MODELS
from torchtitan.models.attention import attends
from torchtitan.models.output import auxiliary_losses
from torchtitan.models.spec import ExpertShape, ModelSpec, build_empty, tensor_roles
from torchtitan.tasks import TASKS
from torchtitan.torch_private.compiler import can_count_once_where_recomputed

TENSOR = "parallelism.tensor_parallel_degree"
EXPERTS = "parallelism.expert_parallel_degree"
VOCABULARY: KeyPath = ("model", "vocab_size")


class RecipeModel(NamedTuple):
    """Model of a recipe."""

    spec: ModelSpec[Any]
    args: Any
    title: str

    def empty(self) -> nn.Module:
        """Return the network without memory."""
        return build_empty(self.spec.build, self.args, 1)

    def experts(self) -> ExpertShape | None:
        """Return the experts of its blocks; None: it has none."""
        return self.spec.experts(self.args)


def model_of(job: JobConfig) -> RecipeModel | None:
    """Return the model of a recipe; None if the flavor is unknown, or its sizes are invalid."""
    spec, flavor = MODELS[job.model.name], job.model.flavor
    if flavor not in spec.flavors or any(job.model.size_problems(job.model_args())):
        return None
    return RecipeModel(spec, job.model_args(), f"{spec.name} {flavor}")


def sizes(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the family has the flavor, and that its sizes are valid."""
    flavors = MODELS[job.model.name].flavors
    if job.model.flavor not in flavors:
        yield Problem("model.flavor", allowed_names(job.model.flavor, flavors), ("model.name",))
        return
    for problem in job.model.size_problems(job.model_args()):
        yield problem.within("model")._replace(also=("model",))


def tensor_parallelism(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that heads, vocabulary and matrices are divisible by the tensor-parallel degree."""
    model, p, tp = model_of(job), job.parallelism, job.parallelism.tensor_parallel_degree
    if model is None or tp == 1:
        return
    args = model.args
    if not model.spec.tensor_plan:
        message = f"{job.model.name} does not say how its matrices are split (tensor_plan); use 1"
        yield Problem(TENSOR, message, ("model",))
        return
    yield from _unmatched(model)
    if not TASKS[model.spec.task].splits_sequences and not p.disable_sequence_parallel:
        message = (
            "between matrices, tensor-parallel ranks would split each sample, and samples of "
            f"the task {model.spec.task} cannot be split over one; use true"
        )
        yield Problem("parallelism.disable_sequence_parallel", message, ("model", TENSOR))
    heads, dims = model.spec.tensor_splits(args)
    for what, count in heads.items():
        if count % tp:
            use = f"use {divisors(count)}"
            message = f"it does not divide the {count} {what} of {model.title}; {use}"
            yield Problem(TENSOR, message, ("model",))
    outputs = model.spec.shapes(args, 1).outputs[-1]
    if -(-outputs // tp) * (tp - 1) >= outputs:
        what = f"the {outputs} {TASKS[model.spec.task].outputs} of {model.title}"
        message = f"{what} are too few for all ranks to have some; use a smaller degree"
        yield Problem(TENSOR, message, ("model",))
    fsdp = job.degrees(world.ranks).fsdp
    for what, dim in dims.items() if fsdp > 0 else ():
        if dim % fsdp:
            message = (
                f"with tensor_parallel_degree {tp}, columns of matrices are split over the "
                f"{fsdp} ranks of data_parallel_shard_degree x context_parallel_degree, which "
                f"do not divide the {what} {dim} of {model.title}; use {divisors(dim)}"
            )
            yield Problem(SHARD, message, ("model", *DEGREES))


def _unmatched(model: RecipeModel) -> Iterator[Problem]:
    """Find patterns of the tensor plan without a module, and weights without a role.

    The weights of the former would not be split; the gradients of the latter would lack a sum.
    """
    spec, network, number = model.spec, model.empty(), re.compile(r"\.\d+(?=\.|$)")
    modules = {number.sub(".*", name) for name, _ in network.named_modules()}
    found = {name: f"matches no module{nearest(name, modules)}" for name in spec.unmatched(network)}
    weighted = {name.rpartition(".")[0] for name, _ in network.named_parameters()}
    without = weighted - tensor_roles(network, spec.tensor_plan).keys()
    found |= {number.sub(".*", name): "has weights, but no role" for name in sorted(without)}
    for name, fault in found.items():
        message = f'in its tensor_plan, "{name}" {fault}; correct the plan of {spec.name}'
        yield Problem("model.name", message, (TENSOR,))


def context_parallelism(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that attention can span ranks, and that batches can be split over a sequence."""
    model, key = model_of(job), "parallelism.context_parallel_degree"
    if model is None or job.parallelism.context_parallel_degree == 1:
        return
    if not attends(model.empty()):
        message = f"{job.model.name} does not use SelfAttention, which can span ranks; use 1"
        yield Problem(key, message, ("model",))
    if not TASKS[model.spec.task].splits_sequences:
        message = f"batches of the task {model.spec.task} cannot be split over a sequence; use 1"
        yield Problem(key, message, ("model",))
    if job.parallelism.balancing == "documents" and not job.model.separates_documents:
        message = (
            'with model.attn_mask_type = "causal" a sequence is one document; use "headtail", or '
            '"block_causal" for the mask'
        )
        yield Problem("parallelism.context_parallel_load_balancer", message, (key, "model"))
    shape = model.spec.attention(model.args)
    if job.parallelism.balancing == "documents" and shape and shape.is_mixed:
        message = (
            f"some blocks of {model.title} attend to a window and others to whole documents, so "
            'their work differs, and no partition balances both; use "headtail", or '
            "model.sliding_window = 0"
        )
        yield Problem("parallelism.context_parallel_load_balancer", message, (key, "model"))


def ulysses(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the ranks that share sequences can share the heads of attention."""
    p, model, method = job.parallelism, model_of(job), "parallelism.context_parallel_rotate_method"
    degree, tp = p.context_parallel_degree, p.tensor_parallel_degree
    if degree == 1 or p.context_parallel_rotate_method != "ulysses" or model is None:
        return
    shape = model.spec.attention(model.args)
    if shape is None or shape.heads % tp or shape.kv_heads % tp:
        return  # reported by other rules
    heads, kv = shape.heads // tp, shape.kv_heads // tp
    possible = [n for n in range(1, heads + 1) if heads % n == 0 and 0 in (n % kv, kv % n)]
    if degree not in possible:
        each = " of each tensor-parallel rank" * (tp > 1)
        message = (
            f'with {method} = "ulysses", ranks share the {heads} heads and {kv} key/value heads'
            f"{each} of {model.title}, and it does not divide them; use {alternatives(possible)}"
        )
        yield Problem("parallelism.context_parallel_degree", message, (method, "model", TENSOR))
    if job.sharding.never_whole:
        message = (
            f'sharding.name = "{job.sharding.name}" computes attention with one shard of the heads '
            'after another, so ranks cannot exchange them; use "ring" or "allgather"'
        )
        yield Problem(method, message, ("sharding", *DEGREES))


def lengths(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that no sequence length is set for a model without sequences."""
    if TASKS[MODELS[job.model.name].task].splits_sequences:
        return
    for section, config in (("training", job.training), ("validation", job.validation)):
        if config.seq_len != type(config).model_fields["seq_len"].default:
            message = f"samples of {job.model.name} are not sequences, so this has no effect"
            yield Problem(f"{section}.seq_len", message, ("model",), "note")


def content(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the data set has the kind of content that the model is trained on."""
    reads = TASKS[MODELS[job.model.name].task].content
    held_out = job.validation.datasets if job.validation.enable else ()
    for key, names in {"data.dataset": (job.data.dataset,), "validation.dataset": held_out}.items():
        for name in names:
            dataset = DATASETS.get(name)
            holds = dataset.content if dataset else "text"
            if holds != reads:
                which = f'"{name}"' if len(names) > 1 else "it"
                message = f"{which} holds {holds}, and {job.model.name} is trained on {reads}"
                hint = f"; name the kind of the files, as in {_names(reads)}" if not dataset else ""
                yield Problem(key, message + hint, ("model",))


def _names(content: str) -> str:
    """Return the data sets with the kind of content that a model reads."""
    return ", ".join(name for name, each in DATASETS.items() if each.content == content)


def router_bias(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that routers have the bias that is to be updated, by counts of all ranks."""
    model, key = model_of(job), "experts.bias_update_rate"
    if model is None:
        return
    experts = model.experts()
    has_bias = bool(experts and experts.has_bias)
    if job.experts.bias_update_rate is not None and not has_bias:
        reason = "its routers have no bias; set model.router_bias = true, or leave it out"
        if not experts:
            reason = "it has no experts; leave it out"
        yield Problem(key, f"{model.title}: {reason}", ("model",))
    counts = has_bias or (experts and experts.has_loss)
    if counts and job.fault_tolerance.enable:
        message = (
            "each replica group would balance the experts by its own tokens; use experts without "
            "model.router_bias and load_balance, or no replica groups"
        )
        yield Problem("fault_tolerance.enable", message, ("model", "auxiliary_losses", "experts"))


def expert_parallelism(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that ranks can have different experts, as many each."""
    model, degree = model_of(job), job.parallelism.expert_parallel_degree
    if model is None or degree == 1:
        return
    experts = model.experts()
    if not experts:
        yield Problem(EXPERTS, f"{model.title} has no experts; use 1", ("model",))
        return
    shared = job.degrees(world.ranks).fsdp
    if experts.number % degree:
        use = f"use {divisors(experts.number)}"
        message = f"it does not divide the {experts.number} experts of {model.title}; {use}"
        yield Problem(EXPERTS, message, ("model",))
    elif shared > 0 and shared % degree:
        fits = (n for n in range(1, shared + 1) if shared % n == experts.number % n == 0)
        message = (
            f"it does not divide the {shared} ranks of data_parallel_shard_degree x "
            f"context_parallel_degree; use {alternatives(fits)}"
        )
        yield Problem(EXPERTS, message, DEGREES)
    elif shared > 0:
        yield from _split_further(model, experts.number // degree, shared // degree, degree)
    if not job.sharding.places_experts:
        message = f'sharding.name = "{job.sharding.name}" has no expert parallelism; use 1, or '
        yield Problem(EXPERTS, f'{message}"fsdp2" there', ("sharding.name",))
    elif job.sharding.neighbors:
        message = "the ranks of an expert are others than those of the rest; use 0"
        yield Problem("sharding.regather_size", message, (EXPERTS,))
    for what in ("weights", "gradients"):
        if (name := getattr(job.communication, what).name) != "plain":
            message = f'with {EXPERTS} {degree}, {what} cannot be sent by "{name}"; use "plain"'
            yield Problem(f"communication.{what}.name", message, (EXPERTS,))


def _split_further(model: RecipeModel, own: int, ranks: int, degree: int) -> Iterator[Problem]:
    """Check that the ranks with the same experts can share them."""
    dim = model.args.dim
    if own % ranks and dim % ranks:
        message = (
            f"with expert_parallel_degree {degree}, {own} experts are split over {ranks} ranks of "
            "data_parallel_shard_degree x context_parallel_degree, which divide neither them nor "
            f"the dim {dim} of {model.title}; use another degree there"
        )
        yield Problem(SHARD, message, ("model", *DEGREES))


def follow_tokenizer(gathered: Gathered) -> None:
    """Set the vocabulary size, if the flavor leaves it open and the tokenizer has more."""
    settings = gathered.settings
    name, flavor = _setting(settings, "name", "llama3"), _setting(settings, "flavor", "debugmodel")
    spec, path = MODELS.get(name), settings.get(("model", "tokenizer_path"))
    if spec is None or flavor not in spec.open_vocabulary or VOCABULARY in settings:
        return
    if path is None or not isinstance(path.value, str):
        return
    try:
        tokens = load_tokenizer(path.value).vocab_size
    except ConfigError:
        return  # reported by the task
    if tokens > (size := spec.flavors[flavor].vocab_size):
        settings[VOCABULARY] = Setting(tokens, path.origin)
        gathered.notices.append(
            f"{path.origin}: model.vocab_size: is {tokens}, as the tokenizer has more than the "
            f"{size} of {flavor}"
        )


def _setting(settings: Mapping[KeyPath, Setting], key: str, default: str) -> str:
    setting = settings.get(("model", key))
    return setting.value if setting and isinstance(setting.value, str) else default


SECTIONS = ("auxiliary_losses", "model", "loss", "compile", "sharding", "parallelism")


def losses(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that each loss is given once, and possible with this model and layout."""
    model, seen = model_of(job), dict[str, int]()
    for number, config in enumerate(job.auxiliary_losses):
        key = f"auxiliary_losses.{number}"
        if (first := seen.setdefault(config.name, number)) != number:
            message = f"auxiliary_losses.{first} has the same name; remove one of the two"
            yield Problem(f"{key}.name", message)
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
