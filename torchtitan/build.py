"""Places what a recipe switches on around the step: the one path from settings to a run.

A feature that is off is in no wrapper and in no list, so the step does not know of it.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial

from torch import Tensor

from torchtitan.checkpoint import Checkpointer, InMemoryState, TrainState
from torchtitan.data import DATASETS, Batch
from torchtitan.data.images.opening import IMAGES
from torchtitan.device import collect_garbage
from torchtitan.job import JobConfig
from torchtitan.metrics import Meter
from torchtitan.metrics.precision import PrecisionWatch
from torchtitan.metrics.statistics import Statistics
from torchtitan.models import MODELS
from torchtitan.optim.qk_clip import QKClip, heads_of
from torchtitan.parallel import Launch, World, stages
from torchtitan.parallel.attention_logits import LargestLogits, attentions
from torchtitan.parts import Observer, Parts
from torchtitan.resilience.replicas import ReplicaGroup
from torchtitan.resilience.replicas.step import GroupBatches, GroupGuard, GroupModel
from torchtitan.resilience.spikes import Guard
from torchtitan.resilience.stop import StopSignal
from torchtitan.step import (
    Agreement,
    Batches,
    CountedBatches,
    Flag,
    GlobalLosses,
    Losses,
    ProbedModel,
    RankBatches,
    ReplicaLosses,
    StepBatch,
    StepModel,
    StepOptimizers,
    StepStatus,
    UpdateGuard,
)
from torchtitan.tasks import Task
from torchtitan.tasks.task import previewed
from torchtitan.validate import Validator

# What the replica groups of a run have in common.
SAME_RECIPE = (
    *("model", "data", "training", "optimizer", "lr_scheduler", "spikes", "parallelism", "debug"),
    "auxiliary_losses",
)

AfterStep = Callable[[TrainState], object]
"""What is done after a step; True: the step is undone, and nothing else is to follow it."""


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


def build(
    job: JobConfig,
    world: World,
    observer: Observer | None = None,
    stop: StopSignal | None = None,
) -> Run:
    """The run that `job` describes, on this rank of `world`.

    Raises:
        ConfigError: where what the task needs, or the data, turn out not to fit the recipe.
    """
    return around_step(Parts(job, world, observer, stop))


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
    replicas, has_replicas = job.communication.replicas, world.degrees.dp_replicate > 1
    runs_apart = replicas.runs_apart and has_replicas
    losses = ReplicaLosses if runs_apart else GlobalLosses
    model: StepModel = losses(parts.model, world, timeline)
    guard: UpdateGuard = Guard(
        job.spikes, state, "made already" if optimizers.in_backward else "skipped"
    )
    if has_replicas and (runs_apart or replicas.steps_verified):
        step_optimizers.after_update = parts.model.after_update
    flags = [
        Flag(lambda: parts.stop.requested, parts.stop.agree),
        Flag(parts.profiler.request, parts.profiler.agree),
    ]
    # In the order in which they follow a step.
    tasks: list[AfterStep] = []
    session: list[AbstractContextManager[object]] = [parts.meter, parts.profiler, parts.stop]

    if job.optimizer.logit_limit:
        limit = LogitLimit(parts, step_optimizers.after_update)
        model = ProbedModel(model, before=limit.begin, after=limit.measure)
        step_optimizers.after_update = limit.apply
    if job.auxiliary_losses:
        weigh = parts.model.auxiliary.begin
        model = ProbedModel(model, before=lambda batch: weigh(state.step + 1))
    if counts_corrupt_images(job, parts.task):
        batches = CountedBatches(
            *(batches, parts.data.left_out, world, timeline),
            record=lambda count: parts.meter.record(corrupt_images=count),
        )
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
        lambda state: state.step % job.training.gc_freq or collect_garbage(),
        once(world.after_first_step),
        once(parts.model.confirm),
        lambda state: parts.model.after_step(state.step, parts.is_finished()),
        lambda state: parts.startup.after_step(state.step),
    ]

    return Run(
        state=state,
        batches=batches,
        optimizers=step_optimizers,
        schedule=lambda step: job.learning_rate_factor(step - state.schedule_start),
        model=model,
        agree=Agreement(world, timeline, flags, norms_differ=runs_apart),
        guard=guard,
        meter=parts.meter,
        checkpoint=parts.checkpoint,
        is_finished=parts.is_finished,
        after_step=partial(in_order, tasks),
        session=partial(open_session, parts, session),
    )


@contextmanager
def open_session(
    parts: Parts, contexts: Sequence[AbstractContextManager[object]]
) -> Iterator[None]:
    """Everything that is open while steps are made, and what a run that did not fail ends with."""
    parts.meter.resume(parts.state.step, parts.state.tokens)
    with ExitStack() as opened:
        for context in contexts:
            opened.enter_context(context)
        # Python collects garbage only on call: at the same step on all ranks, so that none waits.
        opened.callback(gc.enable)
        gc.disable()
        if restart := Launch.read().restart:
            parts.meter.event(parts.state.step, "restart", restart=restart, ranks=parts.world.size)
        yield
        parts.checkpoint.finish()
    parts.divergence.raise_if_diverged()


def counts_corrupt_images(job: JobConfig, task: Task) -> bool:
    """Whether the run skips images that cannot be decoded, and can say how many these were.

    A replica group that is lost leaves lanes behind that others' samples have passed.
    """
    has_images = DATASETS[job.data.dataset].kind in IMAGES if task.content == "images" else False
    return has_images and job.data.images.corrupt == "skip" and not job.fault_tolerance.enable


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
    job, world, config = parts.job, parts.world, parts.job.validation
    # A replica group validates by itself, on the batches of all, and can be lost meanwhile.
    alone = job.accumulation(world.degrees) * job.fault_tolerance.groups
    accumulation = alone if config.unit == "global" else 1
    streams = {
        name: partial(
            parts.task.open_stream,
            data,
            seed=job.debug.seed,
            seq_len=config.seq_len or job.training.seq_len,
            once=config.steps == -1,
            local_batch_size=config.local_batch_size or job.training.local_batch_size,
            accumulation=accumulation,
            rank=world.data_rank,
            ranks=world.degrees.data,
        )
        for name, data in config.data(job.data).items()
    }
    return Validator(config, streams, accumulation, parts.task, parts.model, world)


def validation(parts: Parts) -> AfterStep:
    """Validates when due."""
    validator, job = open_validator(parts), parts.job
    draws = job.validation.picture and parts.task.has_picture and job.parallelism.has_outputs

    def validate(state: TrainState) -> None:
        if validator.is_due(state.step, job.training.steps) and not parts.stop.is_agreed:
            with parts.timeline.pause("validation"):
                found = validator.run()
                picture = validator.picture() if draws else None
            parts.meter.log(state.step, **found)
            if picture is not None and not parts.world.rank:
                parts.meter.picture(state.step, picture)

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


class LogitLimit:
    """Measures the logits of attention in a step, and scales heads down after the update."""

    def __init__(self, parts: Parts, after_update: Callable[[], None] | None) -> None:
        """`after_update` is what else is done then, after it."""
        job, spec, world = parts.job, MODELS[parts.job.model.name], parts.world
        self.meter, self.after_update = parts.meter, after_update
        parameters = [assigned.parameter for assigned in parts.optimizers.assignments]
        assert spec.queries_and_keys is not None, "the recipe was checked"
        queries = spec.queries_and_keys[0]
        own = {
            name: heads_of(parameters, f"{name}.{queries}")
            for part in parts.model.parts
            for name, _ in attentions(part)
        }
        heads = dict(sorted(item for of_rank in world.gather(own) for item in of_rank.items()))
        self.logits = LargestLogits(parts.model.parts, heads, world, job.parallelism)
        self.clip = QKClip(
            job.optimizer.logit_limit, parameters, spec.queries_and_keys, self.logits.places
        )
        self.largest = self.logits.all

    def begin(self, batch: StepBatch) -> None:
        """Before a step's forward."""
        self.logits.begin()

    def measure(self, batch: StepBatch) -> None:
        """After its backward."""
        self.largest = self.logits.agree()
        self.meter.record(max_attention_logit=self.largest.max())

    def apply(self) -> None:
        """After its update."""
        self.clip.apply(self.largest)
        if self.after_update is not None:
            self.after_update()


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
