"""The whole recipe as one tree, with each section imported from its owner."""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field

from torchtitan.checkpoint import CheckpointConfig
from torchtitan.comm import CommunicationConfig
from torchtitan.config import (
    Config,
    Context,
    Discriminated,
    ListOf,
    OneOf,
    Problem,
    Registry,
    counted,
    flat,
    has_wing,
    local_path,
    needs_wing,
)
from torchtitan.config.other_names import SYNONYMS
from torchtitan.convert import CONVERTERS, ConverterConfig
from torchtitan.data import DATA, DataConfig, data_class, without_idle_sections
from torchtitan.data.sizes import StepSizes
from torchtitan.device import DebugConfig
from torchtitan.expert_loads import ExpertsConfig
from torchtitan.losses import AUXILIARY_LOSSES, AuxiliaryLossConfig, LossConfig
from torchtitan.metrics import MetricsConfig
from torchtitan.models import MODEL_SETTINGS, MODELS, with_sizes
from torchtitan.models.llama3 import Llama3Config
from torchtitan.models.settings import ModelConfig
from torchtitan.optim import (
    OPTIMIZER_KEYS,
    OPTIMIZERS,
    SCHEDULES,
    AdamW,
    OptimizerConfig,
    ScheduleConfig,
    WarmupStableDecay,
    without_idle_keys,
)
from torchtitan.parallel import (
    FSDP2,
    SHARDING,
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    Degrees,
    Layout,
    ParallelismConfig,
    Precision,
    ShardingConfig,
)
from torchtitan.profiling import ProfilingConfig
from torchtitan.resilience.replica_groups import FaultToleranceConfig
from torchtitan.resilience.spikes import SpikesConfig
from torchtitan.step import TrainingConfig
from torchtitan.tasks import TASKS
from torchtitan.torchtitan_keys import ADVICE, PRESENT_NAMES
from torchtitan.validate import ValidationConfig

# A checkpoint and a recipe that differ in one of these, or in a size of the model, belong to
# different runs.
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


# Sections that all replica groups of a run share.
SHARED_SECTIONS = (
    *("model", "data", "training", "optimizer", "lr_scheduler", "spikes", "parallelism", "debug"),
    *("auxiliary_losses", "convert", "sharding", "communication"),
)


RECIPE_FILE = "recipe.toml"
"""Name of the resolved recipe in the folder of a run."""

NO_BASE = {
    "model.base_width": "only decoders have rules of rates by width (torchtitan.models.width)"
}


class ManifestSection(Config):
    """Requests of `torchtitan manifest` to a scheduler; they have no effect on a run."""

    account: str = ""
    """Account to charge: `--account` of Slurm, the namespace of Kubernetes."""
    partition: str = ""
    """Partition of Slurm, or the local queue of Kueue on Kubernetes."""
    time_limit_minutes: int | None = Field(None, ge=1)
    """Time limit of the job, on Slurm and Kubernetes; none: the scheduler's own."""
    cpus: int | None = Field(None, ge=1)
    """Cores to request on each node."""
    memory_gib: int | None = Field(None, ge=1)
    """Memory to request on each node, in GiB."""
    setup: tuple[str, ...] = ()
    """Shell lines that run first on each node, such as `source .venv/bin/activate`."""
    log_file: str = ""
    """File to append the output to, in an existing folder; Slurm replaces `%j` by the job
    number."""


HARDWARE = Registry[Callable[[str], Iterator[Problem]]]("hardware")
"""Functions that find what is wrong with `job.hardware`."""


class JobSection(Config):
    """The run as a whole."""

    config_file: str | None = None
    """Recipe to read; only as a flag."""
    dump_folder: str = "outputs"
    """Folder for all output of the run."""
    description: str = ""
    """Description of the run; it has no effect."""
    hardware: str = ""
    """Hardware that the recipe is meant for, a name or a file, as for `torchtitan plan`; it has no
    effect on a run."""
    ranks: int | None = Field(None, ge=1)
    """Number of ranks that the recipe is meant for, as for `torchtitan plan`; it has no effect on a
    run."""
    manifest: ManifestSection = ManifestSection()
    print_config: bool = False
    """Print the resolved recipe at the start."""
    imports: tuple[str, ...] = ()
    """Modules to import first; they can add to MODELS, CONVERTERS, OPTIMIZERS, DATASETS and the
    other registries."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if self.config_file is not None:
            message = 'it can only be a flag; in a recipe, use extends = "other.toml"'
            yield Problem("config_file", message)
        if self.manifest != ManifestSection() and not has_wing("cluster"):
            yield Problem("manifest", needs_wing("cluster"))
        for problems_of in HARDWARE.values() if self.hardware else ():
            yield from problems_of(self.hardware)
        dump = local_path(self.dump_folder)
        existing = next(filter(os.path.exists, (dump, *dump.parents)), None)
        if existing and not existing.is_dir():
            yield Problem("dump_folder", f"{existing} is a file; wanted a folder")
        if not self.dump_folder.strip():
            message = 'must not be empty; use "." for the current folder'
            yield Problem("dump_folder", message)


class StageRecipe(NamedTuple):
    """Steps of a run whose sizes are equal."""

    start: int
    """Number of steps before it."""
    tokens: int
    """Number of tokens before it."""
    job: "JobConfig"
    """The recipe with the sizes of these steps, and no other stages."""


def sizes_of(stages: Iterable[StageRecipe], degrees: Degrees) -> list[StepSizes]:
    """Return the sizes of the steps of all stages."""
    return [
        StepSizes(start, job.global_batch(degrees), job.training.seq_len)
        for start, _, job in stages
    ]


class StagesOfTraining:
    """The stages of a run, and the current one."""

    def __init__(self, stages: Sequence[StageRecipe]) -> None:
        self.all = stages
        self.now = self.recorded = 0
        """Number of the current stage, and of that which the ledger has last."""

    @property
    def job(self) -> "JobConfig":
        """The recipe of the current stage."""
        return self.all[self.now].job

    def at(self, step: int) -> int:
        """Return the number of the stage after `step` steps."""
        return bisect_right([stage.start for stage in self.all], step) - 1

    def move(self, step: int) -> bool:
        """Move to the stage after `step` steps; return whether it is another."""
        before, self.now = self.now, self.at(step)
        return self.now != before


class JobConfig(Config):
    """A recipe."""

    synonyms = SYNONYMS | PRESENT_NAMES
    advice = ADVICE | NO_BASE
    help_command = "torchtitan train --help"

    job: JobSection = JobSection()
    model: Annotated[ModelConfig, OneOf(MODEL_SETTINGS, "llama3")] = Llama3Config()
    convert: Annotated[tuple[ConverterConfig, ...], ListOf(CONVERTERS)] = ()
    data: Annotated[DataConfig, Discriminated(DataConfig, DATA, data_class)] = DataConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: Annotated[OptimizerConfig, OneOf(OPTIMIZERS, "AdamW", OPTIMIZER_KEYS)] = AdamW()
    loss: LossConfig = LossConfig()
    auxiliary_losses: Annotated[tuple[AuxiliaryLossConfig, ...], ListOf(AUXILIARY_LOSSES)] = ()
    experts: ExpertsConfig = ExpertsConfig()
    lr_scheduler: Annotated[ScheduleConfig, OneOf(SCHEDULES, "warmup_stable_decay")] = (
        WarmupStableDecay()
    )
    spikes: SpikesConfig = SpikesConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    sharding: Annotated[ShardingConfig, OneOf(SHARDING, "fsdp2")] = FSDP2()
    communication: CommunicationConfig = CommunicationConfig()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compile: CompileConfig = CompileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    validation: ValidationConfig = ValidationConfig()
    metrics: MetricsConfig = MetricsConfig()
    profiling: ProfilingConfig = ProfilingConfig()
    comm: CommConfig = CommConfig()
    debug: DebugConfig = DebugConfig()

    def model_args(self) -> Any:
        """Return the flavor's arguments, with the recipe's sizes and auxiliary losses."""
        args = MODELS[self.model.name].args(self.model)
        for config in self.auxiliary_losses:
            args = config.over(args)
        return args

    def degrees(self, world_size: int | None) -> Degrees:
        """Return the mesh axis sizes for `world_size` ranks; None: for the minimum number."""
        return self.parallelism.degrees(world_size or self.parallelism.least_ranks)

    def data_ranks(self, degrees: Degrees) -> int:
        """Return the number of ranks with different samples, over all replica groups."""
        return degrees.data * self.fault_tolerance.groups

    def global_batch(self, degrees: Degrees) -> int:
        """Return the number of sequences in an optimizer step."""
        if self.training.global_batch_size > 0:
            return self.training.global_batch_size
        return self.training.local_batch_size * self.data_ranks(degrees)

    def local_batch(self, degrees: Degrees) -> int:
        """Return the number of sequences in a microbatch: at most a rank's share of a step."""
        share = self.global_batch(degrees) // max(self.data_ranks(degrees), 1)
        return max(min(self.training.local_batch_size, share), 1)

    def accumulation(self, degrees: Degrees) -> int:
        """Return the number of microbatches that each rank accumulates in an optimizer step."""
        once = self.local_batch(degrees) * max(self.data_ranks(degrees), 1)
        return self.global_batch(degrees) // once

    def stages(self, degrees: Degrees) -> list["StageRecipe"]:
        """Return the stages of training, in order: one, if the recipe has no others.

        Numbers of tokens are converted to steps, so that all that depends on a stage is a function
        of the step.
        """
        found: list[StageRecipe] = []
        training = self.training.model_copy(update={"stages": ()})
        start = tokens = 0
        for stage in (None, *self.training.stages):
            if stage is not None:
                before = found[-1].job
                each = before.global_batch(degrees) * before.training.seq_len
                if stage.from_step is None:
                    start = found[-1].start - (tokens - (stage.from_tokens or 0)) // each
                else:
                    start = stage.from_step
                tokens += (start - found[-1].start) * each
                training = training.model_copy(update=stage.sizes)
            found.append(StageRecipe(start, tokens, self.model_copy(update={"training": training})))
        return found

    def held_tokens(self, degrees: Degrees) -> int:
        """Return the number of tokens whose activations a rank keeps; with pp, an estimate."""
        held, p = self.local_batch(degrees), self.parallelism
        keeps_all = p.pipeline_parallel_schedule in ("GPipe", "LoopedBFS")
        if degrees.pp > 1 and not keeps_all and not p.pipeline_parallel_schedule_csv:
            held = min(held, degrees.pp * p.pipeline_parallel_microbatch_size)
        return held * self.training.seq_len

    def largest_stage(self, degrees: Degrees) -> StageRecipe:
        """Return the stage whose microbatches take the most memory."""
        stages = self.stages(degrees)
        return max(stages, key=lambda s: (s.job.held_tokens(degrees), s.job.training.seq_len))

    def step_sizes(self, degrees: Degrees) -> list[StepSizes]:
        """Return the sizes of all steps."""
        return sizes_of(self.stages(degrees), degrees)

    def work(self, degrees: Degrees) -> tuple[int, int]:
        """Return the units of the task in a step, and the FLOPs of each."""
        spec, length = MODELS[self.model.name], self.training.seq_len
        units = self.global_batch(degrees) * TASKS[spec.task].units(length)
        return units, spec.flops_per_unit(self.model_args(), length)

    def described(self, degrees: Degrees, step: int) -> str:
        """Describe the sizes of the steps after `step`, which are those of the recipe."""
        return (
            f"from step {step + 1:,} on {counted(self.global_batch(degrees), 'sequence')} of "
            f"{self.training.seq_len:,}: {self.local_batch(degrees)} at a time x "
            f"{self.accumulation(degrees)} accumulated x {self.data_ranks(degrees)} data-parallel"
        )

    def batch_note(self, degrees: Degrees) -> str | None:
        """Explain a batch whose size may surprise, if it does."""
        batch, local = self.global_batch(degrees), self.training.local_batch_size
        on = counted(self.data_ranks(degrees), "data-parallel rank")
        if self.training.global_batch_size == -1:
            return (
                "training.global_batch_size is -1, so the batch of a new run follows the number of "
                f"ranks: {counted(local, 'sequence')} x {on} = {batch:,} in a step; set it to "
                f"{batch} to train the same run on any number of ranks"
            )
        is_set = "local_batch_size" in self.training.model_fields_set
        if is_set and (share := self.local_batch(degrees)) < local:
            return (
                f"training.local_batch_size is {local:,}, but each of {on} has only {share:,} of "
                f"the {counted(batch, 'sequence')} in a step (training.global_batch_size)"
            )
        return None

    def with_batch(self, degrees: Degrees, kept: int | None) -> "JobConfig":
        """Return the recipe with a number of sequences for a `global_batch_size` of -1.

        Args:
            kept: sequences per step of the run to resume, which the data-parallel ranks divide.
        """
        if self.training.global_batch_size != -1:
            return self
        batch, local = kept or self.global_batch(degrees), self.training.local_batch_size
        share = batch // self.data_ranks(degrees)
        if share > local:
            multiple = self.parallelism.pipeline_parallel_microbatch_size if degrees.pp > 1 else 1
            fits = (n for n in range(local, 0, -1) if share % n == n % multiple == 0)
            local = next(fits, local)
        sizes = {"global_batch_size": batch, "local_batch_size": local}
        return self.model_copy(update={"training": self.training.model_copy(update=sizes)})

    def with_kept(self, kept: Iterable[tuple[str, Any]]) -> "JobConfig":
        """Return the recipe with values for keys of `[data]` that it leaves open, by dotted key."""
        values = {key.removeprefix("data."): value for key, value in kept}
        return self.model_copy(update={"data": self.data.model_copy(update=values)})

    def layout(self, degrees: Degrees) -> Layout:
        """Return the settings for `parallelize`, on a mesh of these sizes."""
        return Layout(
            parallelism=self.parallelism,
            precision=Precision(
                parameters=getattr(torch, self.training.dtype),
                compute=getattr(torch, self.training.mixed_precision_param),
                reduce=getattr(torch, self.training.mixed_precision_reduce),
            ),
            cpu_offload=self.training.enable_cpu_offload,
            activation_checkpoint=self.activation_checkpoint,
            compile=self.compile,
            loss=self.loss,
            seq_len=self.training.longest,
            local_batch_size=self.local_batch(degrees),
            convert=self.convert,
            auxiliary_losses=self.auxiliary_losses,
            sharding=self.sharding,
            communication=self.communication,
        )

    def step_size(self) -> int:
        """Return the units of the schedule in a step: 1, or the tokens of a batch of known size."""
        training, in_tokens = self.training, self.lr_scheduler.unit == "tokens"
        return training.global_batch_size * training.seq_len if in_tokens else 1

    def length(self) -> int:
        """Return the length of the run, in the unit of the schedule."""
        steps = self.training.steps
        if self.lr_scheduler.unit == "steps":
            return steps
        stages = self.stages(self.degrees(None))
        last = [stage for stage in stages if stage.start < steps][-1]
        return last.tokens + (steps - last.start) * last.job.step_size()

    def schedule_steps(self) -> int:
        """Return the length of the learning rate schedule, in its unit."""
        return self.lr_scheduler.total_steps or self.length()

    def learning_rate_factor(self, step: int, tokens: int = 0, size: int = 0) -> float:
        """Return the multiplier of the peak learning rate for a step of the schedule, from 1 on.

        Args:
            tokens: tokens of the schedule before the step.
            size: tokens in the step; 0: as in the first.
        """
        size = size or self.step_size()
        step = tokens + size if self.lr_scheduler.unit == "tokens" else step
        return self.lr_scheduler.factor(step, self.schedule_steps(), size)

    def same_run(self) -> set[str]:
        """Return the keys whose values a checkpoint and a recipe of one run share."""
        return SAME_RUN | {f"model.{key}" for key in self.model.sizes()}

    def shared(self) -> dict[str, Any]:
        """Return what all replica groups of a run share, by section or key."""
        tree = self.model_dump(mode="json")
        sections = {f"[{section}]": tree[section] for section in SHARED_SECTIONS}
        return sections | {"fault_tolerance.group_size": self.fault_tolerance.group_size}

    def in_effect(self) -> dict[str, Any]:
        """Return `flat` without `job.manifest`, with the sizes of the recipe or its flavor."""
        values = with_sizes(self.flat())
        return {key: values[key] for key in values if not key.startswith("job.manifest.")}

    def flat(self) -> dict[str, Any]:
        """Return the values by dotted key, as in TOML; `convert.0.name` is in a list."""
        values = {".".join(path): value for path, value in flat(self).items()}
        return without_idle_keys(without_idle_sections(values))
