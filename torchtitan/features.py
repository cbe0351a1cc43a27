"""The features of a training run, as hooks of its step, in one ordered list.

A feature that is off yields no hooks, so the step does not know of it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from torchtitan.checkpoint import Saver, TrainState
from torchtitan.config import Registry
from torchtitan.data import Batch, BatchStream, DataConfig
from torchtitan.device import collect_garbage
from torchtitan.expert_loads import ExpertLoads, routers
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.metrics import Monitor
from torchtitan.metrics.statistics import Statistics
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.parallel import Degrees, Launch, Losses, async_tensor, compile, stages
from torchtitan.parts import Parts
from torchtitan.resilience.grace import outlook, planned_seconds
from torchtitan.resilience.replica_groups.replica_step import GroupGuard, add_up, meet
from torchtitan.step import Flag, UpdateGuard
from torchtitan.validate import Validator


@dataclass(frozen=True)
class Hooks:
    """Calls that a feature makes around a step; None where it makes none.

    Features are called in their order in `features`, at each of these points.
    """

    before_step: Callable[[], None] | None = None
    """Before the data of a step is read."""
    before_forward: Callable[[], None] | None = None
    """Before the forwards and backwards of a step."""
    after_backward: Callable[[Sequence[Batch], Losses], None] | None = None
    """After them, with the step's microbatches and losses, when the gradients are complete and not
    yet clipped."""
    before_update: Callable[[], None] | None = None
    """Before weights change."""
    after_update: Callable[[], None] | None = None
    """After the optimizers have updated the weights, which it may change too."""
    after_step: Callable[[TrainState], object] | None = None
    """After a step was counted; True marks the step as void, and no later feature is called."""
    flag: Flag | None = None
    """Number that all ranks agree on in each step."""
    session: AbstractContextManager[object] | None = None
    """Context that is open while the run trains."""


FEATURES = Registry[Callable[[Parts], Hooks]]("feature", {})
"""Functions that return the hooks of a feature, by the names in `OptimizerConfig.features`."""


def features(parts: Parts, guard: UpdateGuard) -> Iterator[Hooks]:
    """Yield the hooks of all features that are on, in the order in which they are called."""
    job, world, model, state = parts.job, parts.world, parts.model, parts.state
    blocks = sum(len(MODELS[job.model.name].all_blocks(part)) for part in model.parts)
    yield Hooks(session=parts.meter)
    if job.checkpoint.saves:
        parts.stop.outlook = save_outlook(parts)
    yield Hooks(flag=Flag(lambda: parts.stop.requested, parts.stop.agree), session=parts.stop)
    # A step that is void shows that the run is alive, too.
    yield from (Hooks(after_step=partial(note_step, each)) for each in parts.observer.monitors)
    if isinstance(guard, GroupGuard):
        yield replica_group(parts, guard)
    yield Hooks(before_step=parts.startup.before_step)
    yield observer(parts)
    if parts.has_ledger:
        yield Hooks(session=data_ledger(parts))
    if job.auxiliary_losses:
        weigh = model.auxiliary.begin
        yield Hooks(before_forward=lambda: weigh(state.step + 1))
    if loads := open_loads(parts):
        yield expert_loads(parts, loads)
    for name in job.optimizer.features:
        yield FEATURES[name](parts)
    replicas = job.communication.replicas
    if model.replicas and (replicas.runs_apart or replicas.steps_verified):
        yield Hooks(after_update=model.replicas.after_update)
    # A lost replica group leaves lanes behind the samples that others have consumed.
    if (metric := parts.task.left_out(job.data)) and not job.fault_tolerance.enable:
        yield Hooks(before_forward=partial(count_left_out, parts, metric))
    if job.metrics.statistics_freq:
        yield StatisticsProbe(parts).hooks
    if job.checkpoint.enable:
        yield Hooks(before_update=parts.wait_until_writable)
        for saver in parts.checkpoint.savers:
            yield unfinished_saves(parts, saver)
    yield Hooks(after_step=parts.divergence.after_step)
    if job.checkpoint.enable:
        yield Hooks(after_step=partial(save_if_due, parts))
    if job.validation.enable:
        yield validation(parts)
    yield Hooks(
        flag=Flag(parts.profiler.request, parts.profiler.agree),
        after_step=lambda state: parts.profiler.step(state.step),
        session=parts.profiler,
    )
    yield Hooks(after_step=lambda state: collect_garbage(state.step, job.training.gc_freq))
    yield Hooks(after_step=once(world.after_first_step))
    if job.parallelism.enable_async_tensor_parallel and blocks:
        yield Hooks(after_step=once(async_tensor.confirm))
    if job.layout(world.degrees).shards(world.degrees):
        yield Hooks(after_step=once(model.sharding.confirm))
    if job.compile.enable:
        has_loss = not model.pipeline or model.pipeline.last in model.pipeline.parts
        monitor = compile.CompileMonitor(job.compile, blocks, has_loss)
        yield Hooks(after_step=lambda state: monitor.after_step(state.step, parts.is_finished()))
    yield Hooks(after_step=lambda state: parts.startup.after_step(state.step))


def note_step(monitor: Monitor, state: TrainState) -> None:
    """Tell a monitor that a step was done."""
    monitor.after_step(state.step)


def save_outlook(parts: Parts) -> Callable[[], tuple[int, str]]:
    """Return a function that compares the time of a save with the grace period."""
    launch, checkpoint = Launch.read(), parts.checkpoint
    nodes = max(1, launch.size // launch.local_size)
    of_stage = sum(p.numel() for part in parts.model.parts for p in part.parameters())
    planned = planned_seconds(of_stage * parts.world.degrees.pp, nodes)
    return lambda: outlook(
        *(checkpoint.saver.seconds, planned, checkpoint.saved_step, parts.stop.grace)
    )


def once(action: Callable[[], None]) -> Callable[[TrainState], None]:
    """Return a hook that calls `action` after the first step only."""
    left = [action]

    def call(state: TrainState) -> None:
        while left:
            left.pop()()

    return call


def observer(parts: Parts) -> Hooks:
    """Return the hooks of an outside observer, such as `verify`."""
    return Hooks(
        before_step=lambda: parts.observer.before_step(parts.state.step + 1),
        after_step=parts.observer.after_step,
        session=parts.observer.session,
    )


@contextmanager
def data_ledger(parts: Parts) -> Iterator[None]:
    """Record the position in the data at the start and, unless training fails, at the end."""
    job, degrees = parts.job, parts.world.degrees
    if not parts.world.rank and (mixture := parts.data.describe()):
        logger.info("data: %s", mixture)
    position = parts.contents.position()
    parts.ledger.record(
        "start",
        position,
        # Of all launches that trained, `described` keeps the recipe.
        launch=len(list(parts.ledger.path.parent.glob("environment*.json"))),
        ranks=parts.world.size,
        layout={axis: size for axis, size in degrees._asdict().items() if size > 1},
        seq_len=job.training.seq_len,
        global_batch=job.global_batch(degrees),
        identity=position["data"]["identity"] if position else {},
        order=data_order(job, degrees, position) if position else "",
    )
    yield
    parts.ledger.record("end", parts.contents.position())


def data_order(job: JobConfig, degrees: Degrees, position: Mapping[str, Any]) -> str:
    """Return a digest of all that determines the samples of a run, apart from the files."""
    data = job.data.model_dump(mode="json", exclude={"num_workers", "prefetch_factor", "cache"})
    known = [data, job.debug.seed, job.training.seq_len, len(position["data"].get("lanes", ()))]
    if job.data.sources:
        known += [job.training.steps, job.global_batch(degrees)]
    return xxhash.xxh3_64_hexdigest(json.dumps(known).encode())


def replica_group(parts: Parts, guard: GroupGuard) -> Hooks:
    """Return the hooks of a replica group's membership; the last step counts even if it is void."""
    group, gradients = guard.group, parts.optimizers.gradients
    return Hooks(
        before_step=partial(meet, group, parts.state, parts.meter),
        after_backward=partial(add_up, group, gradients, parts.timeline),
        after_step=lambda state: guard.is_void and not (parts.is_finished() and state.step),
        session=group.join(),
    )


def count_left_out(parts: Parts, metric: str) -> None:
    """Record how many documents all ranks have left out since the run started."""
    own = torch.tensor(parts.data.left_out(), device=parts.world.device.torch_device)
    with parts.timeline.phase("sync"):
        parts.meter.record(**{metric: parts.world.sum(own, over="data")})


def open_loads(parts: Parts) -> ExpertLoads | None:
    """Return the counts of the loads of experts, if the model has any."""
    job, world, spec = parts.job, parts.world, MODELS[parts.job.model.name]
    everyones = routers(build_empty(spec.build, job.model_args(), 1))
    if not everyones:
        return None
    return ExpertLoads(
        parts.model.parts,
        list(everyones),
        len(next(iter(everyones.values())).weight),
        job.experts.rate,
        world,
        parts.timeline,
        splits_stream=world.degrees.tp > 1 and not job.parallelism.disable_sequence_parallel,
    )


def expert_loads(parts: Parts, loads: ExpertLoads) -> Hooks:
    """Return the hooks that count the choices of routers, and then balance these."""
    every, last = parts.job.metrics.statistics_freq, parts.job.training.steps

    def report(state: TrainState) -> None:
        if every and (state.step % every == 0 or state.step == last):
            parts.meter.measured(state.step, "experts", **loads.by_expert())

    return Hooks(
        before_forward=loads.begin,
        after_backward=lambda batches, losses: parts.meter.record(**loads.end()),
        after_update=loads.update,
        after_step=report,
    )


class StatisticsProbe:
    """Per-layer statistics, measured when due before clipping; reported if the step counts."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.statistics = parts, open_statistics(parts)
        self.found: dict[str, float] = {}
        self.hooks = Hooks(after_backward=self.measure, after_step=self.report)

    def measure(self, batches: Sequence[Batch], losses: Losses) -> None:
        """Measure the step, if it is due."""
        self.found = {}
        if self.statistics.is_due(self.parts.state.step + 1):
            with self.parts.timeline.pause("statistics"):
                self.found = self.statistics.measure(batches)

    def report(self, state: TrainState) -> None:
        """Pass the values to the meter."""
        if self.found:
            self.parts.meter.measured(state.step, "statistics", **self.found)


def open_statistics(parts: Parts) -> Statistics:
    """Build the per-layer statistics requested by the recipe."""
    job, world, model = parts.job, parts.world, parts.model
    spec, chosen = MODELS[job.model.name], job.parallelism

    def copies(name: str) -> int:
        is_logits = spec.tensor_plan.get(name) == "logits"
        whole = chosen.disable_loss_parallel if is_logits else chosen.disable_sequence_parallel
        return world.degrees.tp if whole else 1

    units = {name for part in model.parts for unit in stages.units(spec, part) for name in unit}
    freq = job.metrics.statistics_freq
    return Statistics(freq, model, parts.optimizers, world, units, copies)


def unfinished_saves(parts: Parts, saver: Saver) -> Hooks:
    """Return hooks that advance a save after each step, by a stage, if no rank is busy with it."""
    busy: list[float] = [0]

    def advance(state: TrainState) -> None:
        if not (busy[0] or saver.is_idle):
            with parts.timeline.pause("checkpoint"):
                saver.advance()

    flag = Flag(lambda: saver.is_busy, lambda agreed: busy.__setitem__(0, agreed))
    return Hooks(flag=flag, after_step=advance)


def save_if_due(parts: Parts, state: TrainState) -> None:
    """Save this step, if it is due."""
    is_final = parts.is_finished()
    if parts.checkpoint.is_due(is_final):
        with parts.timeline.pause("checkpoint"):
            parts.checkpoint.save(state.step == parts.job.training.steps, is_final)


def open_validator(parts: Parts) -> Validator:
    """Build the validator."""
    job, world, config = parts.job, parts.world, parts.job.validation
    # A replica group validates alone, on the batches of all, and may fail while it does.
    alone = job.accumulation(world.degrees) * job.fault_tolerance.groups
    accumulation = alone if config.unit == "global" else 1

    def open_stream(data: DataConfig) -> BatchStream:
        stream = parts.task.open_stream(
            data,
            seed=job.debug.seed,
            seq_len=config.seq_len or job.training.seq_len,
            once=config.steps == -1,
            local_batch_size=config.local_batch_size or job.local_batch(world.degrees),
            accumulation=accumulation,
            rank=world.data_rank,
            ranks=world.degrees.data,
        )
        if parts.data.earlier:
            stream.follow(parts.data.earlier)
        return stream

    streams = {name: partial(open_stream, data) for name, data in config.data(job.data).items()}
    return Validator(config, streams, accumulation, parts.task, parts.model, world)


def validation(parts: Parts) -> Hooks:
    """Return the hooks of validation, with a picture if the task draws one."""
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

    return Hooks(after_step=validate)
