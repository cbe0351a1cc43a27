"""A step among replica groups: wrappers around its batches, its model and the guard of its update.

What `ReplicaGroup` says in one place is what these ask, in the order of a step: the groups meet
before its data is read, add up targets, losses and gradients, and decide together whether it
counts. The norm by which gradients are clipped is the largest of theirs, `ReplicaGroup.max`.
"""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from torchtitan.checkpoint import TrainState
from torchtitan.metrics import Meter
from torchtitan.resilience.replica_groups.group import ReplicaGroup
from torchtitan.step import Batches, Losses, StepBatch, StepModel, StepStatus, UpdateGuard
from torchtitan.timeline import Timeline


class GroupBatches:
    """Batches that are read when all groups have met, with the targets of all of them."""

    def __init__(
        self,
        inner: Batches,
        group: ReplicaGroup,
        state: TrainState,
        meter: Meter,
        timeline: Timeline,
    ) -> None:
        self.inner, self.group, self.state = inner, group, state
        self.meter, self.timeline = meter, timeline

    def __next__(self) -> StepBatch:
        before = self.state.step
        groups = self.group.start_quorum(before)
        if self.state.step != before:
            self.meter.rewind_to(self.state.step, self.state.tokens)
        if groups is not None:
            self.meter.event(self.state.step, "groups", groups=groups)
        batch = next(self.inner)
        with self.timeline.phase("sync"):
            return StepBatch(batch.microbatches, self.group.count(batch.count))

    @property
    def close(self) -> Callable[[], None]:
        """Stops the threads that read ahead."""
        return self.inner.close


class GroupModel:
    """A model whose losses and gradients are added up over the groups."""

    def __init__(
        self,
        inner: StepModel,
        group: ReplicaGroup,
        gradients: Callable[[], Iterable[Tensor]],
        timeline: Timeline,
    ) -> None:
        """`gradients` returns those of this rank, which are changed in place."""
        self.inner, self.group = inner, group
        self.gradients, self.timeline = gradients, timeline

    @property
    def parts(self) -> list[nn.Module]:
        """This rank's parts of the network."""
        return self.inner.parts

    def forward_backward(self, batch: StepBatch) -> Losses:
        """Run the inner model, and sum losses and gradients over all groups."""
        losses = self.inner.forward_backward(batch)
        with self.timeline.phase("sync"):
            self.group.sum([*losses.values(), *self.gradients()])
        return losses


class GroupGuard:
    """A guard that is only asked where the groups agree that the step counts."""

    def __init__(self, inner: UpdateGuard, group: ReplicaGroup) -> None:
        self.inner, self.group = inner, group
        self.is_void = False
        """Whether the last step was void."""

    def accepts(self, status: StepStatus) -> bool:
        """Whether the update of this step is applied."""
        self.is_void = status.is_void = not self.group.should_commit()
        return not self.is_void and self.inner.accepts(status)
