"""The whole recipe as one tree, each section imported from its owner, and the checks across them.

A check sees settings that are each valid; it says which of them cannot work together, and what
would. All checks run before any process group exists and touch nothing but file names.
"""

import importlib
import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from torchtitan import dialect
from torchtitan.checkpoint import CheckpointConfig
from torchtitan.config import (
    Config,
    ConfigError,
    OneOf,
    Problem,
    Recipe,
    RecipeError,
    allowed_names,
    load,
)
from torchtitan.data import DataConfig, check_data
from torchtitan.metrics import MetricsConfig, check_metrics
from torchtitan.models import MODELS
from torchtitan.optim import OPTIMIZERS, AdamW, OptimizerConfig, ScheduleConfig
from torchtitan.parallel import (
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    Degrees,
    ParallelismConfig,
)
from torchtitan.profiling import ProfilingConfig, check_profiling
from torchtitan.validate import ValidationConfig

DTYPES = Literal["float32", "bfloat16"]

# A checkpoint and a recipe that differ in one of these belong to different runs.
SAME_RUN = {
    "model.name",
    "model.flavor",
    "model.tokenizer_path",
    "data.dataset",
    "data.dataset_path",
    "debug.seed",
    "optimizer.name",
    "training.dtype",
}


class JobSection(Config):
    """The run as a whole."""

    config_file: str | None = Field(None, description="The recipe to read (a flag only).")
    dump_folder: str = Field("outputs", description="Folder that everything is written to.")
    description: str = Field("", description="A line for humans.")
    print_config: bool = Field(False, description="Print the resolved recipe at the start.")
    imports: tuple[str, ...] = Field(
        (), description="Modules to import first; they may add to MODELS, OPTIMIZERS, DATASETS."
    )


class ModelSection(Config):
    """Which model."""

    name: str = Field("llama3", description="A key of torchtitan.models.MODELS.")
    flavor: str = Field("debugmodel", description="Which size of it.")
    tokenizer_path: str | None = Field(
        None,
        description="A tokenizer.json or tokenizer.model (tiktoken), or a folder with one; "
        "absent: bytes.",
    )


class TrainingSection(Config):
    """Batches, steps and precision."""

    local_batch_size: int = Field(
        8, ge=1, description="Sequences per data-parallel rank in a microbatch."
    )
    global_batch_size: int = Field(
        -1,
        ge=-1,
        description="Sequences per optimizer step; more than local_batch_size * ranks is "
        "accumulated. -1: no accumulation.",
    )
    seq_len: int = Field(2048, ge=1, description="Tokens in a sequence.")
    steps: int = Field(10000, ge=1, description="Optimizer steps.")
    max_norm: float = Field(
        1.0, ge=0, description="Limit of the global gradient norm; 0: no limit."
    )
    max_skipped_steps: int = Field(
        10,
        ge=1,
        description="End the run after this many steps in a row whose loss or gradient norm was "
        "not finite; each of them is skipped.",
    )
    enable_cpu_offload: bool = Field(
        False, description="Keep parameters, gradients and optimizer state in host memory."
    )
    dtype: DTYPES = Field("float32", description="Dtype in which parameters are stored.")
    mixed_precision_param: DTYPES = Field(
        "bfloat16", description="Dtype in which parameters are gathered and used."
    )
    mixed_precision_reduce: DTYPES = Field(
        "float32", description="Dtype in which gradients are summed over ranks."
    )
    gc_freq: int = Field(50, ge=1, description="Steps between collections of Python's garbage.")


class DebugSection(Config):
    """Seed and determinism."""

    seed: int = Field(0, ge=0, description="Weights and data order follow from it.")
    deterministic: bool = Field(False, description="Only deterministic algorithms; slower on CUDA.")
    deterministic_warn_only: bool = Field(
        False, description="Warn of an operation that has no deterministic algorithm."
    )


class JobConfig(Config):
    """A recipe."""

    job: JobSection = JobSection()
    model: ModelSection = ModelSection()
    data: DataConfig = DataConfig()
    training: TrainingSection = TrainingSection()
    optimizer: Annotated[OptimizerConfig, OneOf(OPTIMIZERS, "AdamW")] = AdamW()
    lr_scheduler: ScheduleConfig = ScheduleConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compile: CompileConfig = CompileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    metrics: MetricsConfig = MetricsConfig()
    profiling: ProfilingConfig = ProfilingConfig()
    comm: CommConfig = CommConfig()
    debug: DebugSection = DebugSection()

    def degrees(self, world_size: int) -> Degrees:
        """Sizes of the mesh axes for `world_size` ranks."""
        return self.parallelism.degrees(world_size)

    def global_batch(self, degrees: Degrees) -> int:
        """Sequences in an optimizer step."""
        if self.training.global_batch_size > 0:
            return self.training.global_batch_size
        return self.training.local_batch_size * degrees.data

    def accumulation(self, degrees: Degrees) -> int:
        """Microbatches that each rank accumulates in an optimizer step."""
        return self.global_batch(degrees) // (self.training.local_batch_size * degrees.data)

    def schedule_steps(self) -> int:
        """Length of the learning rate schedule."""
        return self.lr_scheduler.total_steps or self.training.steps

    def flat(self) -> dict[str, Any]:
        """Dotted keys to values, as TOML could hold them."""
        return {
            f"{section}.{key}": value
            for section, values in self.model_dump(mode="json").items()
            for key, value in values.items()
        }


def load_job(
    recipe: str | Path | None, flags: Sequence[str], world_size: int | None, device_type: str
) -> Recipe[JobConfig]:
    """Read and check a recipe for `world_size` ranks; None: for any number that fits it.

    Raises:
        RecipeError: with all mistakes, one line each.
    """

    def check(job: JobConfig) -> Iterator[Problem]:
        return problems(job, world_size, device_type)

    return load(
        JobConfig, recipe, flags, translate=dialect.translate, prepare=_import_first, check=check
    )


def _import_first(settings: dict[tuple[str, ...], Any]) -> None:
    """Import the modules of `job.imports`, which may add names that the recipe uses."""
    setting = settings.get(("job", "imports"))
    for name in setting.value if setting and isinstance(setting.value, list) else ():
        try:
            importlib.import_module(str(name))
        except ModuleNotFoundError as error:
            raise RecipeError([f"{setting.origin}: job.imports: {error}"]) from None


def problems(job: JobConfig, world_size: int | None, device_type: str) -> Iterator[Problem]:
    """Everything about a recipe, valid in form, that cannot work."""
    yield from _problems_of_degrees(job, world_size)
    yield from _problems_of_model(job)
    yield from _problems_of_batches(job, world_size)
    yield from _problems_of_precision(job)
    yield from _problems_of_files(job)
    yield from _problems_of_exclusion(job)
    found = [*check_metrics(job.metrics), *check_profiling(job.profiling, device_type)]
    for key, message in found:
        yield Problem(key, message)


def smallest_world(job: JobConfig) -> int:
    """The least number of ranks that the degrees of a recipe ask for."""
    p = job.parallelism
    shard = max(p.data_parallel_shard_degree, 1)
    one = p.pipeline_parallel_degree * p.context_parallel_degree * p.tensor_parallel_degree
    return one * p.data_parallel_replicate_degree * shard


DEGREES = tuple(
    f"parallelism.{name}"
    for name in (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "context_parallel_degree",
    )
)


def _problems_of_degrees(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    p = job.parallelism
    shard_key = "parallelism.data_parallel_shard_degree"
    if p.data_parallel_shard_degree == 0:
        yield Problem(shard_key, "got 0; wanted -1 (all ranks left) or a number >= 1")
        return
    needed = smallest_world(job)
    shown = " x ".join(
        f"{name.split('.')[1].removesuffix('_degree')} {getattr(p, name.split('.')[1])}"
        for name in DEGREES
    )
    if world_size is None:
        return
    if p.data_parallel_shard_degree == -1 and world_size % needed:
        message = f"the other degrees take {needed} ranks, which does not divide the {world_size}"
        yield Problem(shard_key, f"{message} there are ({shown})", DEGREES)
    elif p.data_parallel_shard_degree != -1 and needed != world_size:
        message = f"the degrees multiply to {needed}, but there are {world_size} ranks ({shown})"
        rest = needed // p.data_parallel_shard_degree
        hint = ""
        if world_size % rest == 0:
            hint = f"; use data_parallel_shard_degree {world_size // rest} or -1"
        yield Problem(shard_key, message + hint, DEGREES)


def _problems_of_model(job: JobConfig) -> Iterator[Problem]:
    spec = MODELS.get(job.model.name)
    if spec is None:
        message = f'got "{job.model.name}"; {allowed_names(job.model.name, MODELS)}'
        yield Problem("model.name", message)
        return
    args = spec.flavors.get(job.model.flavor)
    if args is None:
        message = f'got "{job.model.flavor}"; {allowed_names(job.model.flavor, spec.flavors)}'
        yield Problem("model.flavor", message, ("model.name",))
        return
    p, whose = job.parallelism, f"{job.model.name} {job.model.flavor}"
    tp_key, also = "parallelism.tensor_parallel_degree", ("model.name", "model.flavor")
    tp = p.tensor_parallel_degree
    for count, what in ((args.n_heads, "heads"), (args.n_kv_heads, "key/value heads")):
        if count % tp:
            divisors = [str(n) for n in range(1, count + 1) if count % n == 0]
            message = f"got {tp}, which does not divide the {count} {what} of {whose}"
            yield Problem(tp_key, f"{message}; use {', '.join(divisors)}", also)
    if args.n_layers < p.pipeline_parallel_degree:
        message = f"got {p.pipeline_parallel_degree}, more than the {args.n_layers} layers"
        yield Problem("parallelism.pipeline_parallel_degree", f"{message} of {whose}", also)


def _problems_of_batches(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    t, p = job.training, job.parallelism
    cp, tp = p.context_parallel_degree, p.tensor_parallel_degree
    parts = tp * (2 * cp if cp > 1 else 1)
    if t.seq_len % parts:
        why = f"tensor_parallel_degree {tp}" + (f" x 2 x context_parallel_degree {cp}" * (cp > 1))
        message = f"got {t.seq_len}, which is not a multiple of {parts} ({why})"
        near = max(round(t.seq_len / parts), 1) * parts
        yield Problem("training.seq_len", f"{message}; use {near}", DEGREES)
    pp, micro = p.pipeline_parallel_degree, p.pipeline_parallel_microbatch_size
    micro_key = "parallelism.pipeline_parallel_microbatch_size"
    if pp > 1 and t.local_batch_size % micro:
        message = f"got {micro}, which does not divide local_batch_size {t.local_batch_size}"
        yield Problem(micro_key, message, ("training.local_batch_size",))
    elif pp > 1 and t.local_batch_size // micro < pp:
        message = f"{t.local_batch_size // micro} microbatches are fewer than the {pp} stages"
        fix = f"use local_batch_size {pp * micro} or more"
        yield Problem(
            "training.local_batch_size", f"{message} of the pipeline; {fix}", (micro_key, *DEGREES)
        )
    if p.data_parallel_shard_degree == 0:
        return
    degrees = job.degrees(world_size or smallest_world(job))
    per_pass = t.local_batch_size * degrees.data
    also = ("training.local_batch_size", *DEGREES)
    if t.global_batch_size == 0:
        yield Problem("training.global_batch_size", "got 0; wanted -1 or a number >= 1", also)
        return
    if degrees.data == 0:
        return
    if job.global_batch(degrees) % per_pass:
        message = (
            f"got {t.global_batch_size}, which is not a multiple of local_batch_size "
            f"{t.local_batch_size} x {degrees.data} data-parallel ranks = {per_pass}"
        )
        near = max(round(t.global_batch_size / per_pass), 1) * per_pass
        yield Problem("training.global_batch_size", f"{message}; use {near}", also)
        return
    sizes = {
        "local_batch_size": t.local_batch_size,
        "accumulation": job.accumulation(degrees),
        "ranks": degrees.data,
    }
    for key, message in check_data(job.data, **sizes):
        yield Problem(key, message, ("training.global_batch_size", *also))
    if job.validation.enable:
        for key, message in check_data(job.validation.data(job.data), **sizes):
            if key.startswith("data.dataset"):
                yield Problem(key.replace("data.", "validation.", 1), message)


def _problems_of_precision(job: JobConfig) -> Iterator[Problem]:
    t = job.training
    if t.dtype == "bfloat16" and t.mixed_precision_param == "float32":
        yield Problem(
            "training.mixed_precision_param",
            'got "float32", but parameters are stored in bfloat16 (training.dtype), which would '
            'gain nothing; use "bfloat16" here or dtype = "float32"',
            ("training.dtype",),
        )
    if job.debug.deterministic_warn_only and not job.debug.deterministic:
        message = "got true, which means nothing without debug.deterministic = true"
        yield Problem("debug.deterministic_warn_only", message, ("debug.deterministic",))


def _problems_of_files(job: JobConfig) -> Iterator[Problem]:
    tokenizer = job.model.tokenizer_path
    if tokenizer is not None and not Path(tokenizer).expanduser().exists():
        yield Problem("model.tokenizer_path", f'there is no file or folder "{tokenizer}"')
    initial = job.checkpoint.initial_load_path
    if initial is not None and not Path(initial).expanduser().exists():
        yield Problem("checkpoint.initial_load_path", f'there is no folder "{initial}"')
    dump = Path(job.job.dump_folder).expanduser()
    for parent in (dump, *dump.parents):
        if parent.exists():
            if not parent.is_dir():
                yield Problem("job.dump_folder", f"{parent} is a file, not a folder")
            break


def _problems_of_exclusion(job: JobConfig) -> Iterator[Problem]:
    c, p = job.checkpoint, job.parallelism
    on = ("checkpoint.enable",)
    if c.resume == "must" and not c.enable:
        yield Problem("checkpoint.resume", 'got "must", but checkpoint.enable is false', on)
    if c.load_step >= 0 and not c.enable:
        message = f"got {c.load_step}, but checkpoint.enable is false; nothing would be loaded"
        yield Problem("checkpoint.load_step", message, on)
    if c.load_step >= 0 and c.resume == "never":
        message = f'got {c.load_step}, but checkpoint.resume is "never"'
        yield Problem("checkpoint.load_step", message, ("checkpoint.resume",))
    if c.load_only and not c.enable:
        yield Problem("checkpoint.load_only", "got true, but checkpoint.enable is false", on)
    if c.export_dtype != "float32" and not c.last_save_model_only:
        message = f'got "{c.export_dtype}", which needs checkpoint.last_save_model_only = true'
        yield Problem("checkpoint.export_dtype", message, ("checkpoint.last_save_model_only",))
    if getattr(job.optimizer, "nesterov", False) and not getattr(job.optimizer, "momentum", 0):
        yield Problem("optimizer.nesterov", "got true, which needs optimizer.momentum > 0")
    option = job.activation_checkpoint.selective_ac_option
    if isinstance(option, int) and option < 1:
        message = f'got {option}; wanted "op" or a number >= 1'
        yield Problem("activation_checkpoint.selective_ac_option", message)
    for name in ("tensor", "pipeline", "context"):
        if (degree := getattr(p, f"{name}_parallel_degree")) > 1:
            message = f"got {degree}; {name} parallelism is not part of this version; use 1"
            yield Problem(f"parallelism.{name}_parallel_degree", message)


def check_machine(job: JobConfig, device_type: str) -> None:
    """Refuse what this very machine cannot do; a check made for another one does not ask.

    Raises:
        ConfigError: with the key and the reason.
    """
    inductor_on_cpu = (
        job.compile.enable and job.compile.backend == "inductor" and device_type == "cpu"
    )
    if inductor_on_cpu and not (shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError(
            "compile.enable: torch.compile on a CPU needs g++ or clang++, and there is neither; "
            'install one, or use compile.backend = "aot_eager"'
        )


def remarks(job: JobConfig) -> Iterator[str]:
    """What works, but perhaps not as its writer thinks."""
    schedule, steps = job.lr_scheduler, job.schedule_steps()
    if schedule.warmup_steps > steps:
        yield (
            f"lr_scheduler.warmup_steps: {schedule.warmup_steps} is more than the {steps} steps "
            "of the schedule; the run ends within the warm-up"
        )
    elif schedule.warmup_steps + schedule.decay_steps(steps) > steps:
        yield (
            f"lr_scheduler.decay_ratio: {schedule.decay_ratio} of {steps} steps reaches into the "
            f"{schedule.warmup_steps} steps of warm-up; the decay begins after them, already "
            "under way"
        )
