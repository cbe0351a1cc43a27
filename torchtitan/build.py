"""Assembles a run from a recipe: the one path from settings to live objects.

`Parts` are the objects themselves. `build` places them around the step: a feature that is off is in
no wrapper and in no list, so that the step does not know of it.
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.checkpoint import (
    Checkpointable,
    Checkpointer,
    InMemoryState,
    ResumePolicy,
    TrainState,
)
from torchtitan.data import Batch, DataConfig, DataStream
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.metrics import (
    EVENTS_FOLDER,
    EventLog,
    Meter,
    Sink,
    SinkContext,
    StragglerWatch,
    build_sinks,
)
from torchtitan.metrics.precision import PrecisionWatch
from torchtitan.metrics.startup import Startup
from torchtitan.metrics.statistics import Statistics
from torchtitan.models import MODELS
from torchtitan.models.initialize import initialize
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.optim import (
    Optimizers,
    learning_rate_factor,
    name_parameters,
    open_optimizers,
)
from torchtitan.parallel import (
    Launch,
    Layout,
    ParallelModel,
    Precision,
    World,
    parallelize,
    stages,
)
from torchtitan.parallel.tensor import redistribute_grads
from torchtitan.profiling import Evidence, Profiler
from torchtitan.provenance import about_run
from torchtitan.resilience.divergence import Divergence
from torchtitan.resilience.replicas import ReplicaGroup
from torchtitan.resilience.replicas.step import GroupBatches, GroupGuard, GroupModel
from torchtitan.resilience.spikes import Guard
from torchtitan.resilience.stop import StopSignal
from torchtitan.step import (
    Agreement,
    Batches,
    Flag,
    GlobalLosses,
    Losses,
    ProbedModel,
    RankBatches,
    StepBatch,
    StepModel,
    StepOptimizers,
    StepStatus,
    UpdateGuard,
)
from torchtitan.tasks import TASKS, Task
from torchtitan.tasks.task import previewed
from torchtitan.timeline import Timeline
from torchtitan.validate import Validator

# What the replica groups of a run have in common.
SAME_RECIPE = (
    *("model", "data", "training", "optimizer", "lr_scheduler", "spikes", "parallelism", "debug"),
)

AfterStep = Callable[[TrainState], object]
"""What is done after a step; True: the step is undone, and nothing else is to follow it."""


@dataclass(frozen=True)
class Observer:
    """Who looks on while a run is trained, such as `verify`."""

    before_step: Callable[[int], None] = lambda step: None
    """Given the step that begins."""
    on_microbatch: Callable[[Batch], Batch] = lambda batch: batch
    """Given each microbatch of this rank as it was read; what it returns is trained on."""
    after_step: Callable[[TrainState], None] = lambda state: None
    sinks: Sequence[Sink] | None = None
    """In place of those of the recipe."""


@dataclass(frozen=True)
class Run:
    """What the loop and the step work with."""

    state: TrainState
    batches: Batches
    optimizers: StepOptimizers
    schedule: Callable[[int], float]
    model: StepModel
    agree: Callable[[Losses, Tensor, Tensor], StepStatus]
    guard: UpdateGuard
    meter: Meter
    checkpoint: Checkpointer
    is_finished: Callable[[], bool]
    after_step: Callable[[TrainState], None]
    session: Callable[[], AbstractContextManager[None]]
    """What is open while steps are made."""


@dataclass(frozen=True)
class Parts:
    """The objects of a run before they are placed around its step."""

    job: JobConfig
    world: World
    observer: Observer
    task: Task
    timeline: Timeline
    model: ParallelModel
    optimizers: Optimizers
    data: DataStream
    state: TrainState
    contents: Checkpointable
    checkpoint: Checkpointer
    meter: Meter
    profiler: Profiler
    stop: StopSignal
    startup: Startup
    divergence: Divergence

    def is_finished(self) -> bool:
        """Whether no step is to follow."""
        if self.stop.is_agreed or self.divergence.reason is not None:
            return True
        return self.state.step >= self.job.training.steps

    def before_step(self) -> None:
        """Tell those who look on which step begins."""
        self.startup.before_step()
        self.observer.before_step(self.state.step + 1)

    def wait_until_writable(self) -> None:
        """Return when nothing copies the weights for a checkpoint any more."""
        if self.checkpoint.is_staging:
            with self.timeline.pause("checkpoint"):
                self.checkpoint.wait_staging()


def build(
    job: JobConfig,
    world: World,
    observer: Observer | None = None,
    stop: StopSignal | None = None,
) -> Run:
    """Make every object of the run that `job` describes, for this rank of `world`.

    Raises:
        ConfigError: where what the task needs, or the data, turn out not to fit the recipe.
    """
    return around_step(assemble(job, world, observer or Observer(), stop or StopSignal()))


def around_step(parts: Parts) -> Run:
    """Place what the recipe has switched on around the step, and nothing else."""
    job, world, timeline = parts.job, parts.world, parts.timeline
    state, optimizers = parts.state, parts.optimizers
    microbatches: Iterator[Batch] = map(parts.observer.on_microbatch, parts.data)
    if world.rank == 0:
        microbatches = previewed(microbatches, parts.task)
    batches: Batches = RankBatches(
        microbatches,
        job.accumulation(world.degrees),
        world,
        timeline,
        parts.data.close,
        parts.before_step,
    )
    step_optimizers = StepOptimizers(
        optimizers, job.training.max_norm, timeline, parts.wait_until_writable
    )
    model: StepModel = GlobalLosses(parts.model, world, timeline)
    guard: UpdateGuard = Guard(
        job.spikes, state, "made already" if optimizers.in_backward else "skipped"
    )
    flags = [
        Flag(lambda: parts.stop.requested, parts.stop.agree),
        Flag(parts.profiler.request, parts.profiler.agree),
    ]
    # In the order in which they follow a step.
    tasks: list[AfterStep] = []
    session: list[AbstractContextManager[object]] = [parts.meter, parts.profiler, parts.stop]

    if job.fault_tolerance.enable:
        group = open_replica_group(parts)
        batches = GroupBatches(batches, group, state, parts.meter, timeline)
        model = GroupModel(model, group, optimizers.gradients, timeline)
        step_optimizers.norm_of_all = group.max
        guard = group_guard = GroupGuard(guard, group)
        session.append(group.join())
        tasks.append(lambda state: group_guard.is_void and not (parts.is_finished() and state.step))
    tasks.append(parts.observer.after_step)
    if job.metrics.precision_freq:
        model = ProbedModel(model, before=precision_probe(parts))
    if job.metrics.statistics_freq:
        statistics = StatisticsProbe(parts)
        model = ProbedModel(model, after=statistics.measure)
        tasks.append(statistics.report)
    if job.checkpoint.enable:
        save = Saving(parts)
        flags.append(Flag(lambda: parts.checkpoint.is_busy, save.agree))
        tasks.append(save.advance)
    tasks.append(parts.divergence.after_step)
    if job.checkpoint.enable:
        tasks.append(save.save)
    if job.validation.enable:
        tasks.append(validation(parts))
    tasks += [
        lambda state: parts.profiler.step(state.step),
        lambda state: state.step % job.training.gc_freq or gc.collect(1),
        once(world.after_first_step),
        once(parts.model.confirm),
        lambda state: parts.model.after_step(state.step, parts.is_finished()),
        lambda state: parts.startup.after_step(state.step),
    ]

    return Run(
        state=state,
        batches=batches,
        optimizers=step_optimizers,
        schedule=lambda step: learning_rate_factor(
            job.lr_scheduler, step - state.schedule_start, job.schedule_steps()
        ),
        model=model,
        agree=Agreement(world, timeline, flags),
        guard=guard,
        meter=parts.meter,
        checkpoint=parts.checkpoint,
        is_finished=parts.is_finished,
        after_step=partial(in_order, tasks),
        session=partial(open_session, parts, session),
    )


def assemble(job: JobConfig, world: World, observer: Observer, stop: StopSignal) -> Parts:
    """Every object of a run, in the order in which they need each other."""
    set_determinism(job)
    folder = Path(job.job.dump_folder).expanduser()
    task, timeline = open_task(job), Timeline(world.device)
    model = build_model(job, world, timeline)
    parameters = name_parameters(model.parts, MODELS[job.model.name].role)
    optimizers = open_optimizers(
        parameters, job.optimizer, world.groups["pp"], world.device, redistribute_grads
    )
    groups, state = job.fault_tolerance, TrainState()
    data = open_stream(
        job,
        task,
        accumulation=job.accumulation(world.degrees),
        rank=groups.group * world.degrees.data + world.data_rank,
        ranks=job.data_ranks(world.degrees),
        groups=groups.groups,
    )
    contents = Checkpointable(model.parts, optimizers, state, data, world, model.state)
    about = about_run(job) if world.rank == 0 else {}
    checkpoint = Checkpointer(resume_policy(job), contents, world, about)
    meter = build_meter(job, task, world, folder, timeline, observer.sinks)
    evidence = Evidence(world.device, timeline, optimizers, job.flat())
    return Parts(
        job=job,
        world=world,
        observer=observer,
        task=task,
        timeline=timeline,
        model=model,
        optimizers=optimizers,
        data=data,
        state=state,
        contents=contents,
        checkpoint=checkpoint,
        meter=meter,
        profiler=Profiler(job.profiling, folder, world.rank, world.device, timeline, evidence),
        stop=stop,
        startup=Startup(meter.events, timeline, world),
        divergence=Divergence(
            *(job.spikes, job.training.max_skipped_steps, state, checkpoint, meter, timeline),
            updates_in_backward=optimizers.in_backward,
        ),
    )


# --- what stands around a step ---


@contextmanager
def open_session(
    parts: Parts, contexts: Sequence[AbstractContextManager[object]]
) -> Iterator[None]:
    """Everything that is open while steps are made, and what a run that did not fail ends with."""
    parts.meter.resume(parts.state.step, parts.state.tokens)
    with ExitStack() as opened:
        for context in contexts:
            opened.enter_context(context)
        # Python collects garbage only when told: at the same step on all ranks, so that none waits.
        opened.callback(gc.enable)
        gc.disable()
        if restart := Launch.read().restart:
            parts.meter.event(parts.state.step, "restart", restart=restart, ranks=parts.world.size)
        yield
        parts.checkpoint.finish()
    parts.divergence.raise_if_diverged()


def in_order(tasks: Sequence[AfterStep], state: TrainState) -> None:
    """Do each task, unless one says that nothing else is to follow."""
    for task in tasks:
        if task(state) is True:
            return


def once(action: Callable[[], None]) -> AfterStep:
    """A task for the first step alone."""
    left = [action]

    def task(state: TrainState) -> None:
        while left:
            left.pop()()

    return task


class Saving:
    """Saves when due, and leads a save through its stages while no rank is busy with it."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.is_busy = False

    def agree(self, is_busy: float) -> None:
        """All ranks know whether one of them is busy."""
        self.is_busy = bool(is_busy)

    def advance(self, state: TrainState) -> None:
        """Go on to the next stage."""
        if not self.is_busy:
            self.parts.checkpoint.advance()

    def save(self, state: TrainState) -> None:
        """Save this step, if it is due."""
        checkpoint, steps = self.parts.checkpoint, self.parts.job.training.steps
        if checkpoint.is_due(self.parts.is_finished()):
            with self.parts.timeline.pause("checkpoint"):
                checkpoint.save(finished=state.step == steps)


def open_validator(parts: Parts) -> Validator:
    """What measures the loss on held-out data."""
    job, world, groups = parts.job, parts.world, parts.job.fault_tolerance
    # A replica group validates by itself, on the batches of all, and can be lost meanwhile.
    alone = job.accumulation(world.degrees) * groups.groups
    streams = {
        name: partial(
            open_stream,
            job,
            parts.task,
            config=config,
            accumulation=alone,
            rank=world.data_rank,
            ranks=world.degrees.data,
        )
        for name, config in job.validation.data(job.data).items()
    }
    return Validator(job.validation, streams, alone, parts.task, parts.model, world)


def validation(parts: Parts) -> AfterStep:
    """Validates when due."""
    validator, job = open_validator(parts), parts.job

    def validate(state: TrainState) -> None:
        if validator.is_due(state.step, job.training.steps) and not parts.stop.is_agreed:
            with parts.timeline.pause("validation"):
                found = validator.run()
            parts.meter.log(state.step, **found)

    return validate


def precision_probe(parts: Parts) -> Callable[[StepBatch], None]:
    """Measures how converted linears round, before a step, when due; gradients are dropped."""
    job = parts.job
    watch = PrecisionWatch(job.metrics.precision_freq, job.convert, parts.model, parts.world)

    def measure(batch: StepBatch) -> None:
        step = parts.state.step + 1
        if watch.is_due(step):
            with parts.timeline.pause("precision"):
                found = watch.measure(step, batch.microbatches[0], batch.count)
            parts.meter.measured(step, "precision", **found)
            parts.optimizers.zero_grad()

    return measure


class StatisticsProbe:
    """Measures each layer when due, before gradients are clipped; reported if the step counts."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.statistics = parts, open_statistics(parts)
        self.found: dict[str, float] = {}

    def measure(self, batch: StepBatch) -> None:
        """After the backward of a step."""
        self.found = {}
        if self.statistics.is_due(self.parts.state.step + 1):
            with self.parts.timeline.pause("statistics"):
                self.found = self.statistics.measure(batch.microbatches)

    def report(self, state: TrainState) -> None:
        """After a step."""
        if self.found:
            self.parts.meter.measured(state.step, "statistics", **self.found)


# --- single objects ---


def open_stream(
    job: JobConfig,
    task: Task,
    *,
    accumulation: int,
    rank: int,
    ranks: int,
    groups: int = 1,
    config: DataConfig | None = None,
) -> DataStream:
    """The data of this rank; `config` in place of the recipe's [data]."""
    return task.open_stream(
        config or job.data,
        seed=job.debug.seed,
        seq_len=job.training.seq_len,
        local_batch_size=job.training.local_batch_size,
        accumulation=accumulation,
        rank=rank,
        ranks=ranks,
        groups=groups,
    )


def open_replica_group(parts: Parts) -> ReplicaGroup:
    """This run as one of several replica groups."""
    job, live = parts.job, InMemoryState(parts.contents, parts.checkpoint.wait_staging)
    tree = job.model_dump(mode="json")
    return ReplicaGroup(
        job.fault_tolerance,
        parts.world,
        parts.data,
        get=live.get,
        put=live.put,
        history=lambda: asdict(live.state),
        recipe={f"[{section}]": tree[section] for section in SAME_RECIPE}
        | {"fault_tolerance.group_size": job.fault_tolerance.group_size, "ranks": parts.world.size},
    )


def open_statistics(parts: Parts) -> Statistics:
    """What measures the layers, as the recipe has it."""
    job, world, model = parts.job, parts.world, parts.model
    spec, chosen = MODELS[job.model.name], job.parallelism

    def copies(name: str) -> int:
        is_logits = spec.tensor_plan.get(name) == "logits"
        whole = chosen.disable_loss_parallel if is_logits else chosen.disable_sequence_parallel
        return world.degrees.tp if whole else 1

    units = {name for part in model.parts for unit in stages.units(spec, part) for name in unit}
    freq = job.metrics.statistics_freq
    return Statistics(freq, model, parts.optimizers, world, units, copies)


def resume_policy(job: JobConfig) -> ResumePolicy:
    """What decides where this run starts from."""
    folder = Path(job.job.dump_folder).expanduser()
    return ResumePolicy(job.checkpoint, folder, job.in_effect(), job.same_run())


def open_task(job: JobConfig) -> Task:
    """What the model is trained to do, with what that needs beside the data: a tokenizer, say."""
    return TASKS[MODELS[job.model.name].task](job.model, job.model_args())


def build_model(job: JobConfig, world: World, timeline: Timeline) -> ParallelModel:
    """Build the network without memory, lay it out, then fill in only what this rank owns."""
    model = lay_out(job, world, timeline)
    allocate(model, job, world)
    spec = MODELS[job.model.name]
    rule = partial(spec.init_std, job.model_args())
    for part in model.parts:
        initialize(part.named_parameters(), rule, job.debug.seed)
    return model


def lay_out(job: JobConfig, world: World, timeline: Timeline) -> ParallelModel:
    """The network in the recipe's layout, still on the meta device."""
    spec = MODELS[job.model.name]
    args = job.model_args()
    layout = layout_of(job)
    network = build_empty(spec.build, args, layout.seq_len, layout.precision.parameters)
    logger.info(
        "%s %s: %s parameters, computed in %s, on %d x %s",
        job.model.name,
        job.model.flavor,
        f"{count_parameters(network).total:,}",
        job.training.mixed_precision_param,
        world.size,
        world.device.name,
    )
    if world.degrees.pp > 1:
        microbatches = job.parallelism.microbatches(job.training.local_batch_size)
        logger.info("%s", stages.describe(job.parallelism, args.n_layers, microbatches))
    return parallelize(network, spec, args, layout, world, timeline)


def layout_of(job: JobConfig) -> Layout:
    """What `parallelize` has to know of a recipe."""
    return Layout(
        parallelism=job.parallelism,
        precision=Precision(
            parameters=getattr(torch, job.training.dtype),
            compute=getattr(torch, job.training.mixed_precision_param),
            reduce=getattr(torch, job.training.mixed_precision_reduce),
        ),
        cpu_offload=job.training.enable_cpu_offload,
        activation_checkpoint=job.activation_checkpoint,
        compile=job.compile,
        loss=job.loss,
        seq_len=job.training.seq_len,
        local_batch_size=job.training.local_batch_size,
        convert=job.convert,
        sharding=job.sharding,
        communication=job.communication,
    )


def allocate(model: ParallelModel, job: JobConfig, world: World) -> None:
    """Give the parts of a model memory, uninitialised, and fill their buffers."""
    device = world.device.torch_device
    for part in model.parts:
        part.to_empty(device="cpu" if job.training.enable_cpu_offload else device)
        for module in part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        part.init_buffers()  # type: ignore[operator]


def build_meter(
    job: JobConfig,
    task: Task,
    world: World,
    folder: Path,
    timeline: Timeline,
    sinks: Sequence[Sink] | None,
) -> Meter:
    """The meter with `sinks`, or else those that the recipe enables."""
    spec = MODELS[job.model.name]
    context = SinkContext(
        folder=folder,
        rank=world.rank,
        total_steps=job.training.steps,
        tensorboard_folder=job.metrics.save_tb_folder,
        color=not job.metrics.disable_color_printing,
        run_name=job.metrics.run_name,
        tags=job.metrics.tags,
        recipe=job.in_effect(),
    )
    flops = spec.flops_per_unit(job.model_args(), job.training.seq_len)
    return Meter(
        build_sinks(job.metrics, context) if sinks is None else sinks,
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
        gather=world.table if world.size > 1 else None,
        timeline=timeline,
        events=EventLog(folder / EVENTS_FOLDER if job.metrics.save_events else None, world.rank),
        stragglers=StragglerWatch(job.metrics.straggler_pct, world.degrees.pp),
    )


def set_determinism(job: JobConfig) -> None:
    """Seed the generators and, if asked, allow only deterministic algorithms."""
    torch.manual_seed(job.debug.seed)
    if job.debug.deterministic:
        # Read by cuBLAS when it is first used; without it torch refuses matrix products on CUDA.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Torch imports its compiler to set it, which takes a second, so it is left as it is where it is
    # right.
    if job.debug.deterministic or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(
            job.debug.deterministic, warn_only=job.debug.deterministic_warn_only
        )
