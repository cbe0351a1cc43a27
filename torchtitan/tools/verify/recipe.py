"""The recipe as it is verified: laid out as it is written, but exact, short, on data at hand.

Whatever is changed for that is reported, key by key. What a flag of the command line says stays.
"""

import itertools
import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torchtitan.config import ConfigError, Recipe, exists, show
from torchtitan.data import DATASETS, load_tokenizer
from torchtitan.job import JobConfig
from torchtitan.losses import LossConfig
from torchtitan.models import MODELS
from torchtitan.models.spec import MinShape
from torchtitan.parallel import (
    ActivationCheckpointConfig,
    CompileConfig,
    Degrees,
    ParallelismConfig,
    stages,
)
from torchtitan.parallel.schedules import SCHEDULES

# What a shrunk recipe has at most. The vocabulary has room for bytes.
LAYERS = 4
VOCABULARY = 320
SEQ_LEN = 64

EPS = 1e-5
"""Least `eps` of an optimizer, well above the rounding of gradients."""

LOGITS = 2**28
"""Bytes that the logits of one rank's microbatch may take."""


@dataclass(frozen=True)
class Checked:
    """The two runs that are compared."""

    job: JobConfig
    ranks: int
    one: JobConfig
    """The same on one rank, with no technique applied."""
    changes: list[str]
    is_exact: bool
    """Whether they are the same run; otherwise the layout is compared with a modelled one."""


class Draft:
    """The settings of a recipe while they are changed."""

    def __init__(self, recipe: Recipe[JobConfig]) -> None:
        self.tree: dict[str, Any] = recipe.config.model_dump(mode="json")
        self.from_flags = {
            ".".join(path) for path, o in recipe.origins.items() if o.startswith("--")
        }
        self.changes: list[str] = []

    @property
    def job(self) -> JobConfig:
        return JobConfig.model_validate(self.tree)

    def set(self, key: str, value: Any, why: str) -> None:
        """Change a setting, unless a flag says it."""
        *sections, name = key.split(".")
        section = reduce(lambda tree, part: tree[part], sections, self.tree)
        was = section[name]
        if was != value and key not in self.from_flags:
            section[name] = value
            self.changes.append(f"{key} = {show(value)} (was {show(was)}): {why}")

    def lower(self, key: str, limit: float, why: str) -> None:
        """Change a setting that is above `limit` to it."""
        section, name = key.split(".")
        self.set(key, min(self.tree[section][name], limit), why)


def derive_checked(
    recipe: Recipe[JobConfig], *, world_size: int | None, steps: int | None, shrink: bool
) -> Checked:
    """Derive the recipes to compare, on `world_size` ranks or as few as show the whole layout."""
    draft = Draft(recipe)
    make_short(draft, steps, 5)
    for key in draft.job.optimizer.rounded_by:
        why = "rounding hides errors, and layouts round differently"
        draft.set(f"optimizer.{key}", "parameter", why)
    draft.tree["checkpoint"] = {"enable": False}
    draft.changes.append("no checkpoint, metrics or profile is written, and there is no validation")
    ranks = make_ready(draft, world_size, shrink, ParallelismConfig())
    exact = is_exact(draft.job, draft.job.degrees(ranks))
    if not exact:
        draft.changes.append(
            "everything is computed in float64: in float32 the result of a sum depends on its "
            "order, and rounding to few bits amplifies that"
        )
    return Checked(draft.job, ranks, _alone(draft.job, ranks), draft.changes, exact)


def is_exact(job: JobConfig, degrees: Degrees) -> bool:
    """Whether a layout trains the run of one rank."""
    ways = job.communication
    shared = degrees.fsdp == 1 or (ways.weights.is_exact and ways.gradients.is_exact)
    return shared and (degrees.dp_replicate == 1 or ways.replicas.is_exact)


def use_float64(job: JobConfig) -> JobConfig:
    """A recipe that computes in float64, which none can ask for."""
    keys = ("dtype", "mixed_precision_param", "mixed_precision_reduce")
    training = job.training.model_copy(update=dict.fromkeys(keys, "float64"))
    return job.model_copy(update={"training": training})


def make_ready(draft: Draft, world_size: int | None, shrink: bool, other: ParallelismConfig) -> int:
    """Make it exact, and small if wanted, with a model that fits `other` too; returns its ranks."""
    _make_exact(draft)
    if shrink:
        if world_size is None:
            _make_layout_small(draft)
        _make_model_small(draft, other)
    _find_data(draft)
    # Parameters that are split over as many ranks as there are: two show it.
    takes_all = draft.job.parallelism.data_parallel_shard_degree == -1
    ranks = world_size or draft.job.parallelism.least_ranks * (2 if takes_all else 1)
    if shrink:
        _make_batches_small(draft, ranks)
    return ranks


def _make_exact(draft: Draft) -> None:
    for name in ("dtype", "mixed_precision_param", "mixed_precision_reduce"):
        draft.set(f"training.{name}", "float32", "rounding in bfloat16 would hide errors")
    if "dtype" in draft.tree["communication"]["gradients"]:
        why = "rounding in bfloat16 would hide errors"
        draft.set("communication.gradients.dtype", "float32", why)
    if "ns_dtype" in draft.tree["optimizer"]:
        draft.set("optimizer.ns_dtype", "float32", "rounding in bfloat16 would hide errors")
    draft.set("compile.enable", False, "compilation takes long and rounds differently")
    for key, (value, why) in draft.job.sharding.verified_as().items():
        draft.set(f"sharding.{key}", value, why)
    if draft.job.sharding.in_graph:
        draft.set(
            "parallelism.fsdp_reshard_after_forward", "default", ("the compiler frees parameters")
        )
    if draft.tree["convert"]:
        draft.tree["convert"] = []
        draft.changes.append("[[convert]] is removed: rounding in Float8 would hide errors")
    draft.set("parallelism.enable_async_tensor_parallel", False, "it needs CUDA")
    own, why = draft.tree["optimizer"], "smaller gradients are rounding, which Adam would amplify"
    if own.get("eps", EPS) < EPS:
        draft.set("optimizer.eps", EPS, why)
    for group in own["groups"]:
        if (was := group.get("eps") or EPS) < EPS:
            group["eps"] = EPS
            draft.changes.append(f"optimizer.groups: eps = {EPS} (was {was}): {why}")
    draft.set("optimizer.early_step_in_backward", False, "gradients are compared after a step")


def make_short(draft: Draft, steps: int | None, default: int) -> None:
    """Few steps, and nothing but steps; what is said of checkpoints is left to the caller."""
    if steps is not None:
        draft.from_flags.discard("training.steps")
    draft.set("training.steps", steps or default, "set by --steps")
    draft.set("lr_scheduler.total_steps", None, "the number of steps")
    draft.set("training.stages", [], "the run is short")
    for number, source in enumerate(draft.job.data.sources):
        if source.weight is None:
            own = f"{source.label}: {source.spec}"
            draft.tree["data"]["sources"][number] |= source.with_weight().model_dump(mode="json")
            draft.changes.append(f"data.sources: weight = 1 (was {own}): the run is short")
    draft.lower("lr_scheduler.warmup_steps", 2, "so that weights move")
    draft.from_flags.discard("fault_tolerance.enable")
    draft.set("fault_tolerance.enable", False, "a single replica group is checked")
    draft.set("spikes.sigma", 0.0, "no step may be skipped, as that would hide errors")
    draft.set("spikes.max_rollbacks", 0, "there is nothing to roll back from")
    # Adam moves every weight by about this, however small its gradient is, even one of rounding.
    draft.lower("optimizer.lr", 1e-3, "the tolerance of weights is a hundredth of it")
    # Nothing but steps is done, so these have nothing to say; a row of metrics a step is read.
    metrics = {"log_freq": 1, "save_events": False}
    draft.tree |= {"validation": {}, "profiling": {}, "metrics": metrics}


def _make_layout_small(draft: Draft) -> None:
    """Two ranks on each axis that has more."""
    axes = ["data_parallel_replicate", "data_parallel_shard", "tensor_parallel"]
    axes += ["context_parallel", "expert_parallel"]
    if not draft.job.parallelism.pipeline_parallel_schedule_csv:
        axes.append("pipeline_parallel")
    for axis in axes:
        draft.lower(f"parallelism.{axis}_degree", 2, "--shrink: two ranks suffice")


def _make_model_small(draft: Draft, other: ParallelismConfig) -> None:
    """Set sizes of the recipe's structure that fit both layouts."""
    draft.set("parallelism.module_fqns_per_model_part", [], "--shrink: the layers differ")
    draft.set("parallelism.pipeline_parallel_layers_per_stage", None, "--shrink: fewer layers")
    job = draft.job
    args, chosen, spec = job.model_args(), job.parallelism, MODELS[job.model.name]
    layers = min(args.n_layers, LAYERS)
    for layout in (chosen, other):
        if layout.pipeline_parallel_degree > 1:
            layers = max(layers, len(stages.ranks(layout, layers)))
    tensor_ranks = math.lcm(chosen.tensor_parallel_degree, other.tensor_parallel_degree)
    vocabulary = min(getattr(args, "vocab_size", VOCABULARY), VOCABULARY)
    small = spec.shrink(args, MinShape(layers, tensor_ranks, vocab_size=vocabulary))
    sizes, before = spec.settings.sizes_of(small), spec.settings.sizes_of(args)
    draft.tree["model"] |= sizes
    if draft.job.model_args() != small:
        raise ConfigError(f"--shrink: the settings of {spec.name} do not have all of its sizes")
    draft.changes += [
        f"model.{key} = {show(size)} (was {show(before[key])}): --shrink"
        for key, size in sizes.items()
        if size != before[key]
    ]
    draft.lower("loss.vocabulary_chunk", vocabulary // 3, "--shrink: fewer tokens")
    tokenizer = job.model.tokenizer
    if _is_there(tokenizer) and load_tokenizer(tokenizer).vocab_size > vocabulary:
        draft.set("model.tokenizer_path", None, "--shrink: it has too many tokens; bytes are used")
    sequence_ranks = math.lcm(chosen.context_parallel_degree, other.context_parallel_degree)
    parts = tensor_ranks * 2 * sequence_ranks
    draft.lower("training.seq_len", -(-SEQ_LEN // parts) * parts, "--shrink")


def _find_data(draft: Draft) -> None:
    """Replace settings that need something this machine lacks."""
    tokenizer, data = draft.job.model.tokenizer, draft.job.data
    if tokenizer is not None and not _is_there(tokenizer):
        draft.set("model.tokenizer_path", None, "it does not exist; bytes are used")
    why = ""
    absent = [s.label for s in data.sources if not all(map(exists, s.places))]
    if absent:
        why = f"the files of {', '.join(absent)} do not exist"
        draft.set("data.sources", (), why)
        draft.set("data.stages", (), why)
    elif data.sources:
        return
    elif data.dataset_path is not None and not _is_there(data.dataset_path):
        why = "the files do not exist"
    elif data.dataset in DATASETS and DATASETS[data.dataset].kind == "hub":
        why = "no data is read over a network"
    if why:
        content = DATASETS[data.dataset].content if data.dataset in DATASETS else "text"
        at_hand = (name for name, each in DATASETS.items() if each.is_at_hand(content))
        draft.set("data.dataset", next(at_hand), why)
        draft.set("data.dataset_path", None, why)


def _is_there(path: str | None) -> bool:
    return path is not None and exists(path)


def _make_batches_small(draft: Draft, ranks: int) -> None:
    """A few sequences a rank: two microbatches of two, or what fills a pipeline."""
    job, why = draft.job, "--shrink"
    degrees, chosen = job.degrees(ranks), job.parallelism
    accumulation = max(min(job.accumulation(degrees), 2), 1)
    if degrees.pp == 1:
        draft.lower("training.local_batch_size", 2, why)
    elif not chosen.pipeline_parallel_schedule_csv:
        draft.lower("parallelism.pipeline_parallel_microbatch_size", 2, why)
        size = draft.job.parallelism.pipeline_parallel_microbatch_size
        batch = size * _microbatches(chosen)
        draft.set("training.local_batch_size", batch, why)
        accumulation = 1
    once = draft.job.training.local_batch_size * degrees.data
    draft.set("training.global_batch_size", once * accumulation, why)
    draft.set("data.lanes", -1, why)
    draft.set("data.num_workers", 0, why)


def _microbatches(chosen: ParallelismConfig) -> int:
    """As many as a pipeline has stages, or the next number that its schedule can run."""
    pp, count = chosen.pipeline_parallel_degree, len(stages.ranks(chosen, LAYERS))
    schedule, least = SCHEDULES[chosen.pipeline_parallel_schedule], max(count, 2 * pp)
    return next(n for n in itertools.count(least) if schedule.runs(n, count, pp))


def _alone(job: JobConfig, ranks: int) -> JobConfig:
    """The run of `job` on one rank: in as few microbatches as fit, nothing applied to the model."""
    batch = job.global_batch(job.degrees(ranks))
    shapes = MODELS[job.model.name].shapes(job.model_args(), job.training.seq_len)
    sequence = 4 * math.prod(shapes.outputs)
    fits = [n for n in range(1, batch + 1) if batch % n == 0 and n * sequence <= LOGITS]
    training = {
        "global_batch_size": batch,
        "local_batch_size": max(fits, default=1),
        "enable_cpu_offload": False,
    }
    return job.model_copy(
        update={
            "training": job.training.model_copy(update=training),
            "parallelism": ParallelismConfig(data_parallel_shard_degree=1),
            "activation_checkpoint": ActivationCheckpointConfig(mode="none"),
            "compile": CompileConfig(),
            # A loss of several depths has no logits but in chunks.
            "loss": job.loss if job.auxiliary_losses else LossConfig(),
        }
    )
