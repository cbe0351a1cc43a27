"""From a recipe to a run: its objects, then its features in the order in which they act.

A feature that is off is not in the list, so no step knows of it.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchtitan.checkpoint import Checkpointable, Checkpointer, ResumePolicy, TrainState
from torchtitan.config import Registry, local_path
from torchtitan.data import Batch
from torchtitan.device import collect_garbage, set_determinism
from torchtitan.expert_loads import ExpertLoads, routers
from torchtitan.inputs import open_stream, open_task, validation_streams
from torchtitan.job import JobConfig, StagesOfTraining
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
from torchtitan.metrics.statistics import Statistics
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.parallel import Launch, World, async_tensor, build_model, build_optimizers, compile
from torchtitan.profiling import Evidence, Profiler
from torchtitan.provenance import about_run, record_data, record_start, sink_context
from torchtitan.resilience.divergence import Divergence
from torchtitan.resilience.replica_groups import InMemoryState, ReplicaGroup
from torchtitan.resilience.replica_groups.replica_step import GroupGuard, add_up, meet
from torchtitan.resilience.spikes import Guard
from torchtitan.resilience.stop import StopSignal, handled, outlook, planned_seconds
from torchtitan.step import Agreement, Batches, Hooks, StepOptimizers, StepVote, UpdateGuard, once
from torchtitan.tasks import previewed
from torchtitan.timeline import Timeline
from torchtitan.torch_private.compiler import compilers_spared
from torchtitan.validate import Validator


@dataclass(frozen=True)
class Observer:
    """Observer of a training run, such as `verify`."""

    before_step: Callable[[int], None] = lambda step: None
    """Called with the step that starts."""
    on_microbatch: Callable[[Batch], Batch] = lambda batch: batch
    """Called with each microbatch of this rank; training uses the returned one."""
    after_step: Callable[[TrainState], None] = lambda state: None
    at_request: Callable[[], None] = lambda: None
    """Called on all ranks when a trace of the run was requested."""
    sinks: Sequence[Sink] | None = None
    """Sinks that replace those of the recipe."""
    session: AbstractContextManager[None] | None = None
    """Context in which steps run; entered once the run's state is loaded."""
    monitors: Sequence[Monitor] = ()
    """Monitors of the run, opened before it is built."""

    def hooks(self, state: TrainState) -> Hooks:
        """Return the hooks in a run with this state."""
        return Hooks(
            before_step=lambda: self.before_step(state.step + 1),
            after_step=lambda step: self.after_step(state),
            session=self.session,
        )


class Run:
    """The objects of a run on this rank; the loop and the features work with them."""

    def __init__(self, job: JobConfig, world: World, observer: Observer, stop: StopSignal) -> None:
        """Build the objects, in the order of their dependencies."""
        self.job, self.world, self.observer, self.stop = job, world, observer, stop
        self.task, self.timeline, self.state = open_task(job), Timeline(world.device), TrainState()
        layout, args = job.layout(world.degrees), job.model_args()
        self.model = build_model(job.model, args, layout, world, self.timeline, job.debug.seed)
        spec = MODELS[job.model.name]
        optimizers = build_optimizers(job.optimizer, self.model, spec, args, job.compile)
        self.optimizers = StepOptimizers(optimizers, job.training.max_norm, self.timeline)
        degrees = world.degrees
        self.data = open_stream(
            job,
            self.task,
            degrees,
            rank=job.fault_tolerance.group * degrees.data + world.data_rank,
            device=world.device,
        )
        for note in dict.fromkeys(self.task.notes(job.data)) if world.rank == 0 else ():
            logger.info("note: %s", note)
        self.batches = Batches(
            self._microbatches(),
            job.accumulation(degrees),
            world,
            self.timeline,
            close=self.data.close,
        )
        self.agree = Agreement(world, self.timeline, norms_differ=self.model.runs_apart)
        self.contents = Checkpointable(self.model, optimizers, self.state, self.data)
        context = sink_context(job, world)
        self.ledger = DataLedger(context, self.data.sources)
        about = about_run(job, self.task) if world.rank == 0 else {}
        self.checkpoint = Checkpointer(resume_policy(job), self.contents, about, self.ledger.record)
        recipe = job.flat() | {"training.local_batch_size": job.local_batch(degrees)}
        evidence = Evidence(world.device, self.timeline, optimizers, recipe)
        self.profiler = Profiler(
            job.profiling,
            context.folder,
            world.rank,
            world.device,
            self.timeline,
            evidence,
            at_request=observer.at_request,
        )
        self.meter = self.open_meter(context)  # from now on, others see this run
        self.startup = Startup(self.meter.events, self.timeline, world, optimizers.state_bytes)
        self.divergence = Divergence(
            job.spikes,
            job.training.max_skipped_steps,
            self.state,
            self.checkpoint,
            self.meter,
            self.timeline,
            updates_in_backward=optimizers.in_backward,
        )
        change = "made already" if optimizers.in_backward else "skipped"
        self.guard: UpdateGuard = Guard(job.spikes, self.state, change)
        self.stages = StagesOfTraining(job.stages(degrees))
        if job.training.stages:
            self.resize(self.stages.job)
            self.contents.before_data = self.follow_stage
        self.calls_after_step: Sequence[Callable[[int], object]] = ()
        self.sessions: Sequence[AbstractContextManager[object]] = ()
        # Their threads may ask at once.
        for monitor in self.observer.monitors:
            monitor.watch(
                self.timeline,
                unit=self.task.unit,
                rate=self.task.rate,
                total_steps=self.job.training.steps,
                saved_step=lambda: self.checkpoint.saved_step,
                is_finished=self.is_finished,
            )

    def attach(self, features: Sequence[Hooks]) -> None:
        """Call each feature in the steps from here on, in order at each point."""

        def calls(point: str) -> list[Any]:
            return [call for hooks in features if (call := getattr(hooks, point)) is not None]

        self.batches.before_step = calls("before_step")
        self.model.before_forward = calls("before_forward")
        self.model.after_backward = calls("after_backward")
        self.optimizers.before_update = calls("before_update")
        self.optimizers.after_update = calls("after_update")
        self.agree.votes = calls("vote")
        self.calls_after_step, self.sessions = calls("after_step"), calls("session")

    def schedule(self, step: int) -> float:
        """Return the multiplier of the peak learning rate in a step."""
        state = self.state
        tokens = state.tokens - state.schedule_start_tokens
        size = self.stages.job.step_size()
        return self.job.learning_rate_factor(step - state.schedule_start, tokens, size)

    def follow_stage(self) -> None:
        """Take the sizes of the next step; the state of the data must be loaded next."""
        if self.stages.move(self.state.step):
            self.resize(self.stages.job)

    def resize(self, job: JobConfig) -> None:
        """Take the sizes of the steps of a stage."""
        degrees, t = self.world.degrees, job.training
        local, accumulation = job.local_batch(degrees), job.accumulation(degrees)
        self.meter.resize(*job.work(degrees))
        packing = self.task.packing(job.data, t.seq_len, job.debug.seed)
        self.data.resize(packing, t.seq_len, local_batch_size=local, accumulation=accumulation)
        self.batches.accumulation = accumulation
        if pipeline := self.model.pipeline:
            pipeline.resize(t.seq_len, job.parallelism.microbatches(local))

    def after_step(self) -> None:
        """Make the calls after a step, until one marks it as void."""
        for call in self.calls_after_step:
            if call(self.state.step) is True:
                return

    def is_finished(self) -> bool:
        """Whether no steps are left."""
        if self.stop.is_agreed or self.divergence.is_diverged:
            return True
        return self.state.step >= self.job.training.steps

    @contextmanager
    def session(self) -> Iterator[None]:
        """Open the sessions of all features, and finish the run at the end if it did not fail."""
        self.meter.resume(self.state.step, self.state.tokens)
        with ExitStack() as opened:
            for session in self.sessions:
                opened.enter_context(session)
            # Garbage is collected only on call: at the same step on all ranks, so that none waits.
            opened.callback(gc.enable)
            gc.disable()
            if restart := Launch.read().restart:
                self.meter.event(self.state.step, "restart", restart=restart, ranks=self.world.size)
            yield
            if self.job.checkpoint.enable:
                with self.timeline.pause("checkpoint"):
                    self.checkpoint.wait_until_idle()
            self.checkpoint.finish()
        self.divergence.raise_if_diverged()

    @property
    def has_hash(self) -> bool:
        """Whether samples have a hash, which all ranks together know."""
        return self.task.content == "text" and not self.job.fault_tolerance.enable

    @property
    def has_ledger(self) -> bool:
        """Whether the run records the samples that it reads."""
        return self.observer.sinks is None and self.has_hash

    def data_read(self) -> tuple[int, int | None]:
        """Return the samples that all ranks have read, and this rank's term of their hash."""
        return self.data.samples, self.data.hash.term if self.world.is_first_of_data else 0

    def _microbatches(self) -> Iterator[Batch]:
        """Yield the microbatches of this rank, logging the first sample on rank 0."""
        stream = map(self.observer.on_microbatch, self.data)
        if self.world.rank:
            return stream
        return previewed(stream, self.task, lambda: self.state.step > 0)

    def open_meter(self, context: SinkContext) -> Meter:
        """Open the meter of the run."""
        job, task, world, metrics = self.job, self.task, self.world, self.job.metrics
        folder, (units, flops) = context.folder / EVENTS_FOLDER, job.work(world.degrees)
        return Meter(
            self.sinks(context),
            log_freq=metrics.log_freq,
            total_steps=job.training.steps,
            unit=task.unit,
            rate=task.rate,
            units_per_step=units,
            flops_per_unit=flops,
            peak_flops=world.device.peak_flops(getattr(torch, job.training.mixed_precision_param)),
            devices=world.size * job.fault_tolerance.groups,
            device=world.device,
            rank=world.rank,
            data=self.data_read if self.has_hash else None,
            gather=world.table if world.size > 1 else None,
            timeline=self.timeline,
            events=EventLog(folder if metrics.save_events else None, world.rank),
            stragglers=StragglerWatch(metrics.straggler_pct, world.degrees.pp),
            shares=self.data.take_shares,
            sources=self.data.report,
        )

    def sinks(self, context: SinkContext) -> Sequence[Sink]:
        """Return the sinks of this rank, with the monitors."""
        sinks = self.observer.sinks
        if sinks is None:
            ledger = [self.ledger] if self.has_ledger and self.world.rank == 0 else []
            sinks = [*ledger, *build_sinks(self.job.metrics, context)]
        return [*sinks, *self.observer.monitors]


def build(
    job: JobConfig, world: World, observer: Observer | None = None, stop: StopSignal | None = None
) -> Run:
    """Build the run described by `job`, on this rank of `world`.

    Raises:
        ConfigError: if the data, or files that the task needs, do not fit the recipe.
    """
    set_determinism(job.debug)
    run = Run(job, world, observer or Observer(), stop or StopSignal())
    run.attach(list(features(run)))
    return run


FEATURES = Registry[Callable[[Run], Hooks]]("feature", {})
"""Functions that return the hooks of a feature, by the names in `OptimizerConfig.features`."""


def features(run: Run) -> Iterator[Hooks]:
    """Yield the hooks of all features that are on, in the order in which they act."""
    job, model, checkpoint, stop = run.job, run.model, run.checkpoint, run.stop
    spec = MODELS[job.model.name]
    blocks = sum(len(spec.all_blocks(part)) for part in model.parts)
    yield Hooks(session=run.meter)
    if job.checkpoint.saves:
        stop.outlook = save_outlook(run)
    yield Hooks(vote=StepVote(lambda: stop.requested, stop.agree), session=stop)
    for monitor in run.observer.monitors:
        # A step that is void shows that the run is alive, too.
        yield Hooks(after_step=monitor.after_step)
    if job.fault_tolerance.enable:
        yield replica_groups(run)
    yield Hooks(before_step=run.startup.before_step)
    if job.training.stages:
        yield Hooks(before_step=partial(begin_stage, run))
    yield run.observer.hooks(run.state)
    if run.has_ledger:
        yield Hooks(session=record_data(run.stages, run.world, run.ledger, run.data, run.contents))
    if job.auxiliary_losses:
        yield Hooks(before_forward=lambda: model.auxiliary.begin(run.state.step + 1))
    if routers_of_all := routers(build_empty(spec.build, job.model_args(), 1)):
        splits_stream = run.world.degrees.tp > 1 and not job.parallelism.disable_sequence_parallel
        loads = ExpertLoads(model, routers_of_all, job.experts.rate, splits_stream=splits_stream)
        yield loads.hooks(run.meter, job.metrics.statistics_freq, job.training.steps)
    for name in job.optimizer.features:
        yield FEATURES[name](run)
    replicas = job.communication.replicas
    if model.replicas and (replicas.runs_apart or replicas.steps_verified):
        yield Hooks(after_update=model.replicas.after_update)
    if average := run.optimizers.inner.average:
        yield Hooks(after_update=average.step)
    # A lost replica group leaves lanes behind the samples that others have consumed.
    if (metric := run.task.left_out(job.data)) and not job.fault_tolerance.enable:
        yield Hooks(before_forward=partial(count_left_out, run, metric))
    if job.metrics.statistics_freq:
        every, optimizers = job.metrics.statistics_freq, run.optimizers.inner
        statistics = Statistics(every, model, optimizers, spec, job.parallelism)
        yield statistics.hooks(lambda: run.state.step, run.meter, run.timeline)
    if job.checkpoint.enable:
        yield checkpoint.unfinished(run.timeline)
    yield Hooks(after_step=lambda step: run.divergence.after_step(run.state))
    if job.checkpoint.enable:
        yield checkpoint.saving(run.timeline, job.training.steps, run.is_finished)
    if job.validation.enable:
        yield open_validator(run).hooks(
            run.meter, run.timeline, job.training.steps, lambda: stop.is_agreed
        )
    profiler = run.profiler
    yield Hooks(vote=StepVote(profiler.is_signaled, profiler.agree_on_signals))
    yield Hooks(
        vote=StepVote(profiler.request, profiler.agree), after_step=profiler.step, session=profiler
    )
    yield Hooks(after_step=lambda step: collect_garbage(step, job.training.gc_freq))
    yield Hooks(after_step=once(run.world.after_first_step))
    if job.parallelism.enable_async_tensor_parallel and blocks:
        yield Hooks(after_step=once(async_tensor.confirm))
    if job.layout(run.world.degrees).shards(run.world.degrees):
        yield Hooks(after_step=once(model.sharding.confirm))
    if job.compile.enable:
        compiled = compile.CompileMonitor(job.compile, blocks, model.has_loss)
        yield Hooks(
            after_step=lambda step: compiled.after_step(step, run.is_finished()),
            session=compilers_spared(handled()),
        )
    yield Hooks(after_step=run.startup.after_step)


def begin_stage(run: Run) -> None:
    """Begin the stage of training of the next step, if it is another.

    The data is what it would be if the run was resumed here with other sizes.
    """
    stages, step = run.stages, run.state.step
    if stages.at(step) != stages.now:
        position = run.world.broadcast_object(run.contents.position())
        run.follow_stage()
        run.data.load_state_dict(position["data"])
        if run.world.rank == 0:
            logger.info("training.stages: %s", stages.job.described(run.world.degrees, step))
    if stages.recorded != stages.now:
        stages.recorded = stages.now
        if run.has_ledger:
            record_start(stages.job, run.world, run.ledger, run.contents.position())


def save_outlook(run: Run) -> Callable[[], tuple[int, str]]:
    """Return a function that compares the time of a save with the grace period."""
    launch, checkpoint = Launch.read(), run.checkpoint
    nodes = max(1, launch.size // launch.local_size)
    of_stage = sum(p.numel() for part in run.model.parts for p in part.parameters())
    planned = planned_seconds(of_stage * run.world.degrees.pp, nodes)
    return lambda: outlook(checkpoint.saver.seconds, planned, checkpoint.saved_step, run.stop.grace)


def replica_groups(run: Run) -> Hooks:
    """Make this run one of several replica groups; the last step counts even if it is void."""
    job = run.job
    group = ReplicaGroup(
        job.fault_tolerance,
        run.world,
        run.data,
        InMemoryState(run.contents, run.checkpoint.wait_staging),
        recipe=job.shared() | {"ranks": run.world.size},
    )
    run.guard = guard = GroupGuard(run.guard, group)
    run.batches.count_of_all, run.agree.norm_of_all = group.count, group.max
    return Hooks(
        before_step=partial(meet, group, run.state, run.meter),
        after_backward=partial(add_up, group, run.optimizers.inner.gradients, run.timeline),
        after_step=lambda step: guard.is_void and not (run.is_finished() and step),
        session=group.join(),
    )


def count_left_out(run: Run, metric: str) -> None:
    """Record how many documents all ranks have left out since the run started."""
    own = torch.tensor(run.data.left_out(), device=run.world.device.torch_device)
    with run.timeline.phase("sync"):
        run.meter.record(**{metric: run.world.sum(own, over="data")})


def open_validator(run: Run) -> Validator:
    """Build the validator."""
    job, world = run.job, run.world
    accumulation, streams = validation_streams(job, run.task, run.data, world)
    draws = job.validation.picture and run.task.has_picture and job.parallelism.has_outputs
    average = run.optimizers.inner.average if job.validation.average else None
    return Validator(
        job.validation,
        streams,
        accumulation,
        run.task,
        run.model,
        world,
        draws=draws,
        weights=average.in_use if average else nullcontext,
    )


def resume_policy(job: JobConfig) -> ResumePolicy:
    """Return the policy that determines the checkpoint to start from."""

    def factor(step: int, tokens: int, batch: int | None = None) -> float:
        return job.with_batch(job.degrees(None), batch).learning_rate_factor(step, tokens)

    return ResumePolicy(
        job.checkpoint,
        local_path(job.job.dump_folder),
        job.in_effect(),
        job.same_run(),
        job.optimizer,
        factor=factor,
    )
