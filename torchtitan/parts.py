"""The objects of a run, built from its recipe in the order of their dependencies."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from torchtitan.checkpoint import Checkpointable, Checkpointer, ResumePolicy, TrainState
from torchtitan.config import local_path
from torchtitan.data import Batch
from torchtitan.inputs import open_stream, open_task
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.metrics import (
    EVENTS_FOLDER,
    EventLog,
    Meter,
    Monitor,
    Sink,
    SinkContext,
    StragglerWatch,
    build_sinks,
)
from torchtitan.metrics.data_ledger import DataLedger
from torchtitan.metrics.startup import Startup
from torchtitan.models import MODELS, attention
from torchtitan.models.experts import parameters_in_words
from torchtitan.models.initialize import initialize
from torchtitan.models.spec import build_empty
from torchtitan.optim import Compiled, name_parameters, open_optimizers
from torchtitan.parallel import ParallelModel, World, parallelize, stages
from torchtitan.parallel.compile import compiled
from torchtitan.parallel.tensor import redistribute_grads
from torchtitan.profiling import Evidence, Profiler
from torchtitan.provenance import about_run
from torchtitan.resilience.divergence import Divergence
from torchtitan.resilience.stop import StopSignal
from torchtitan.tasks import Task
from torchtitan.timeline import Timeline
from torchtitan.torch_private.dtensor import allocate as allocate_weights


@dataclass(frozen=True)
class Observer:
    """Observer of a training run, such as `verify`."""

    before_step: Callable[[int], None] = lambda step: None
    """Called with the step that starts."""
    on_microbatch: Callable[[Batch], Batch] = lambda batch: batch
    """Called with each microbatch of this rank; training uses the returned one."""
    after_step: Callable[[TrainState], None] = lambda state: None
    sinks: Sequence[Sink] | None = None
    """Sinks that replace those of the recipe."""
    session: AbstractContextManager[None] | None = None
    """Context in which steps run; entered once the run's state is loaded."""
    monitors: Sequence[Monitor] = ()
    """Monitors of the run, opened before it is built."""


class Parts:
    """Objects of a run, before `build` assembles its step."""

    def __init__(
        self,
        job: JobConfig,
        world: World,
        observer: Observer | None = None,
        stop: StopSignal | None = None,
    ) -> None:
        """Build them, for this rank of `world`.

        Raises:
            ConfigError: if the task's files, or the data, turn out not to fit the recipe.
        """
        set_determinism(job)
        self.job, self.world = job, world
        self.observer, self.stop = observer or Observer(), stop or StopSignal()
        self.task, self.timeline, self.state = open_task(job), Timeline(world.device), TrainState()
        self.model, spec = build_model(job, world, self.timeline), MODELS[job.model.name]
        self.optimizers = open_optimizers(
            name_parameters(self.model.parts, spec.role, partial(spec.heads, job.model_args())),
            job.optimizer,
            world.groups["pp"],
            world.device,
            redistribute_grads,
            update_compiler(job),
        )
        groups, degrees = job.fault_tolerance, world.degrees
        self.data = open_stream(
            job,
            self.task,
            degrees,
            rank=groups.group * degrees.data + world.data_rank,
            ranks=job.data_ranks(degrees),
            groups=groups.groups,
            device=world.device,
        )
        runs_apart = job.communication.replicas.runs_apart
        self.contents = Checkpointable(
            *(self.model.parts, self.optimizers, self.state, self.data, world, self.model.state),
            copies=degrees.dp_replicate if runs_apart else 1,
            start_over=self.model.start_over,
        )
        context, sinks = sink_context(job, world), self.observer.sinks
        self.ledger = DataLedger(context, self.data.sources)
        self.has_ledger = sinks is None and self.has_hash
        if sinks is None:
            ledger = [self.ledger] if self.has_ledger and world.rank == 0 else []
            sinks = [*ledger, *build_sinks(job.metrics, context)]
        about = about_run(job) if world.rank == 0 else {}
        for key in self.task.unknown:
            about.get("recipe", {}).pop(key, None)
        self.checkpoint = Checkpointer(
            resume_policy(job), self.contents, world, about, self.ledger.record
        )
        folder = local_path(job.job.dump_folder)
        for monitor in self.observer.monitors:
            monitor.watch(
                self.timeline,
                unit=self.task.unit,
                rate=self.task.rate,
                total_steps=job.training.steps,
                saved_step=lambda: self.checkpoint.saved_step,
                is_finished=self.is_finished,
            )
            sinks = [*sinks, monitor]
        self.meter = build_meter(
            *(job, self.task, world, self.timeline, sinks),
            data=self.data_read if self.has_hash else None,
            shares=self.data.take_shares,
            sources=self.data.report,
        )
        recipe = job.flat() | {"training.local_batch_size": job.local_batch(degrees)}
        evidence = Evidence(world.device, self.timeline, self.optimizers, recipe)
        self.profiler = Profiler(
            job.profiling, folder, world.rank, world.device, self.timeline, evidence
        )
        self.startup = Startup(self.meter.events, self.timeline, world, self.optimizers.state_bytes)
        self.divergence = Divergence(
            job.spikes,
            job.training.max_skipped_steps,
            self.state,
            self.checkpoint,
            self.meter,
            self.timeline,
            updates_in_backward=self.optimizers.in_backward,
        )

    def data_read(self) -> tuple[int, int | None]:
        """Return the samples that all ranks have read, and this rank's term of their hash."""
        return self.data.samples, self.data.hash.term if self.world.is_first_of_data else 0

    @property
    def has_hash(self) -> bool:
        """Whether samples have a hash, which all ranks together know."""
        return self.task.content == "text" and not self.job.fault_tolerance.enable

    def is_finished(self) -> bool:
        """Whether no steps are left."""
        if self.stop.is_agreed or self.divergence.is_diverged:
            return True
        return self.state.step >= self.job.training.steps

    def wait_until_writable(self) -> None:
        """Wait until no checkpoint is copying the weights."""
        if self.checkpoint.is_staging:
            with self.timeline.pause("checkpoint"):
                self.checkpoint.wait_staging()


def resume_policy(job: JobConfig) -> ResumePolicy:
    """Return the policy that determines the checkpoint to start from."""
    folder = local_path(job.job.dump_folder)
    return ResumePolicy(
        *(job.checkpoint, folder, job.in_effect(), job.same_run(), job.optimizer),
        factor=job.learning_rate_factor,
    )


def build_model(job: JobConfig, world: World, timeline: Timeline) -> ParallelModel:
    """Build the network without memory, parallelize it, then fill in only this rank's parts."""
    model = lay_out(job, world, timeline)
    allocate(model, job, world)
    spec = MODELS[job.model.name]
    rule = partial(spec.init_std, job.model_args())
    for part in model.parts:
        initialize(part.named_parameters(), rule, job.debug.seed)
    return model


def lay_out(job: JobConfig, world: World, timeline: Timeline) -> ParallelModel:
    """Return the network in the recipe's layout, still on the meta device."""
    spec = MODELS[job.model.name]
    args = job.model_args()
    layout = job.layout(world.degrees)
    network = build_empty(spec.build, args, layout.seq_len, layout.precision.parameters)
    logger.info(
        "%s %s: %s, computed in %s, on %d x %s",
        job.model.name,
        job.model.flavor,
        parameters_in_words(network),
        job.training.mixed_precision_param,
        world.size,
        world.device.name,
    )
    shape = spec.attention(args)
    if mask := attention.describe(
        *(shape.window_in(layout.seq_len) if shape else 0, world.device.type),
        *(layout.precision.compute, shape.head_dim if shape else 0),
        separates_documents=job.model.separates_documents,
        is_mixed=shape is not None and shape.is_mixed,
        has_sinks=shape is not None and shape.has_sinks,
    ):
        logger.info("attention: %s", mask)
    if world.degrees.pp > 1:
        microbatches = job.parallelism.microbatches(layout.local_batch_size)
        logger.info("%s", stages.describe(job.parallelism, len(spec.blocks(network)), microbatches))
    return parallelize(network, spec, args, layout, world, timeline)


def allocate(model: ParallelModel, job: JobConfig, world: World) -> None:
    """Allocate the parts of a model, uninitialized, and fill their buffers."""
    device = world.device.torch_device
    for part in model.parts:
        allocate_weights(part, "cpu" if job.training.enable_cpu_offload else device)
        for module in part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        part.init_buffers()  # type: ignore[operator]


def update_compiler(job: JobConfig) -> Compiled | None:
    """Return a compiler for the expensive part of an update; None if nothing is compiled."""
    return partial(compiled, config=job.compile) if job.compile.enable else None


def sink_context(job: JobConfig, world: World) -> SinkContext:
    """Return the facts about the run that sinks write."""
    return SinkContext(
        folder=local_path(job.job.dump_folder),
        rank=world.rank,
        total_steps=job.training.steps,
        tensorboard_folder=job.metrics.save_tb_folder,
        color=not job.metrics.disable_color_printing,
        run_name=job.metrics.run_name,
        tags=job.metrics.tags,
        recipe=job.in_effect(),
    )


def build_meter(
    job: JobConfig,
    task: Task,
    world: World,
    timeline: Timeline,
    sinks: Sequence[Sink],
    data: Callable[[], tuple[int, int | None]] | None,
    shares: Callable[[], Mapping[str, tuple[int, int]]],
    sources: Callable[[], Mapping[str, float]],
) -> Meter:
    """Build the meter."""
    spec, folder = MODELS[job.model.name], local_path(job.job.dump_folder)
    flops = spec.flops_per_unit(job.model_args(), job.training.seq_len)
    return Meter(
        sinks,
        log_freq=job.metrics.log_freq,
        total_steps=job.training.steps,
        unit=task.unit,
        rate=task.rate,
        units_per_step=job.global_batch(world.degrees) * task.units(job.training.seq_len),
        flops_per_unit=flops,
        peak_flops=world.device.peak_flops(getattr(torch, job.training.mixed_precision_param)),
        devices=world.size * job.fault_tolerance.groups,
        device=world.device,
        rank=world.rank,
        data=data,
        gather=world.table if world.size > 1 else None,
        timeline=timeline,
        events=EventLog(folder / EVENTS_FOLDER if job.metrics.save_events else None, world.rank),
        stragglers=StragglerWatch(job.metrics.straggler_pct, world.degrees.pp),
        shares=shares,
        sources=sources,
    )


def set_determinism(job: JobConfig) -> None:
    """Seed the generators and, if asked, allow only deterministic algorithms."""
    torch.manual_seed(job.debug.seed)
    if job.debug.deterministic:
        # Read by cuBLAS on first use; without it torch refuses matrix products on CUDA.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Torch imports its compiler for this setting, which takes a second, so it is set only if
    # needed.
    if job.debug.deterministic or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(
            job.debug.deterministic, warn_only=job.debug.deterministic_warn_only
        )
