"""From a recipe to a run: the parts of a step, with the hooks of every feature that is on."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial

from torch import Tensor

from torchtitan.checkpoint import Checkpointer, InMemoryState, TrainState
from torchtitan.data import Batch
from torchtitan.features import Hooks, features
from torchtitan.job import JobConfig
from torchtitan.metrics import Meter
from torchtitan.parallel import Launch, Losses, ParallelModel, World
from torchtitan.parts import Observer, Parts
from torchtitan.resilience.replica_groups import ReplicaGroup
from torchtitan.resilience.replica_groups.replica_step import GroupGuard
from torchtitan.resilience.spikes import Guard
from torchtitan.resilience.stop import StopSignal
from torchtitan.step import (
    Agreement,
    Batches,
    StepOptimizers,
    StepStatus,
    UpdateGuard,
)
from torchtitan.tasks.task import previewed

# Settings that all replica groups of a run share.
SAME_RECIPE = (
    *("model", "data", "training", "optimizer", "lr_scheduler", "spikes", "parallelism", "debug"),
    "auxiliary_losses",
)


@dataclass(frozen=True)
class Run:
    """The objects that the training loop and the step work with."""

    state: TrainState
    batches: Batches
    optimizers: StepOptimizers
    schedule: Callable[[int], float]
    model: ParallelModel
    agree: Callable[[Losses, Tensor, Tensor], StepStatus]
    guard: UpdateGuard
    meter: Meter
    checkpoint: Checkpointer
    is_finished: Callable[[], bool]
    after_step: Callable[[TrainState], None]
    session: Callable[[], AbstractContextManager[None]]
    """Context in which steps run."""


def build(
    job: JobConfig, world: World, observer: Observer | None = None, stop: StopSignal | None = None
) -> Run:
    """Build the run described by `job`, on this rank of `world`.

    Raises:
        ConfigError: if the data, or files that the task needs, do not fit the recipe.
    """
    return assemble(Parts(job, world, observer, stop))


def assemble(parts: Parts) -> Run:
    """Assemble the parts of a step, with the hooks of each feature that is on."""
    job, world, timeline, optimizers = parts.job, parts.world, parts.timeline, parts.optimizers
    group = open_replica_group(parts) if job.fault_tolerance.enable else None
    guard: UpdateGuard = Guard(
        job.spikes, parts.state, "made already" if optimizers.in_backward else "skipped"
    )
    if group:
        guard = GroupGuard(guard, group)
    hooks = list(features(parts, guard))

    runs_apart = job.communication.replicas.runs_apart and world.degrees.dp_replicate > 1
    model = parts.model
    model.before_forward = [hook.before_forward for hook in hooks if hook.before_forward]
    model.after_backward = [hook.after_backward for hook in hooks if hook.after_backward]
    batches = Batches(
        microbatches(parts),
        job.accumulation(world.degrees),
        world,
        timeline,
        close=parts.data.close,
        before_step=[hook.before_step for hook in hooks if hook.before_step],
        count_of_all=group.count if group else None,
    )
    return Run(
        state=parts.state,
        batches=batches,
        optimizers=StepOptimizers(
            optimizers,
            job.training.max_norm,
            timeline,
            norm_of_all=group.max if group else None,
            before_update=[hook.before_update for hook in hooks if hook.before_update],
            after_update=[hook.after_update for hook in hooks if hook.after_update],
        ),
        schedule=lambda step: job.learning_rate_factor(step - parts.state.schedule_start),
        model=model,
        agree=Agreement(
            world, timeline, [hook.flag for hook in hooks if hook.flag], norms_differ=runs_apart
        ),
        guard=guard,
        meter=parts.meter,
        checkpoint=parts.checkpoint,
        is_finished=parts.is_finished,
        after_step=partial(call_until_void, [hook.after_step for hook in hooks if hook.after_step]),
        session=partial(open_session, parts, hooks),
    )


def microbatches(parts: Parts) -> Iterator[Batch]:
    """Yield the microbatches of this rank, logging the first sample on rank 0."""
    stream = map(parts.observer.on_microbatch, parts.data)
    if parts.world.rank:
        return stream
    return previewed(stream, parts.task, lambda: parts.state.step > 0)


def call_until_void(calls: Sequence[Callable[[TrainState], object]], state: TrainState) -> None:
    """Make each call, until one returns True."""
    for call in calls:
        if call(state) is True:
            return


@contextmanager
def open_session(parts: Parts, hooks: Sequence[Hooks]) -> Iterator[None]:
    """Open the sessions of all features, and finish the run at the end if it did not fail."""
    parts.meter.resume(parts.state.step, parts.state.tokens)
    with ExitStack() as opened:
        for hook in hooks:
            if hook.session is not None:
                opened.enter_context(hook.session)
        # Garbage is collected only on call: at the same step on all ranks, so that none waits.
        opened.callback(gc.enable)
        gc.disable()
        if restart := Launch.read().restart:
            parts.meter.event(parts.state.step, "restart", restart=restart, ranks=parts.world.size)
        yield
        if parts.job.checkpoint.enable:
            with parts.timeline.pause("checkpoint"):
                parts.checkpoint.wait_until_idle()
        parts.checkpoint.finish()
    parts.divergence.raise_if_diverged()


def open_replica_group(parts: Parts) -> ReplicaGroup:
    """Make this run one of several replica groups."""
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
