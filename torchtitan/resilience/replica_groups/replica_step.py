"""A step among replica groups, as calls around its batches, its model and its update.

`ReplicaGroup` does in one place what these ask for, in the order of a step: the groups meet before
data is read, add up targets, losses and gradients, and decide together whether the step counts.
Gradients are clipped by the largest of the groups' norms, `ReplicaGroup.max`.
"""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from torchtitan.checkpoint import TrainState
from torchtitan.data import Batch
from torchtitan.metrics import Meter
from torchtitan.parallel import Losses
from torchtitan.resilience.replica_groups.group import ReplicaGroup
from torchtitan.step import StepStatus, UpdateGuard
from torchtitan.timeline import Timeline


def meet(group: ReplicaGroup, state: TrainState, meter: Meter) -> None:
    """Wait for all groups before a step; one that is behind takes over the state of another."""
    before = state.step
    groups = group.start_quorum(before)
    if state.step != before:
        meter.rewind_to(state.step, state.tokens)
    if groups is not None:
        meter.event(state.step, "groups", groups=groups)


def add_up(
    group: ReplicaGroup,
    gradients: Callable[[], Iterable[Tensor]],
    timeline: Timeline,
    batches: Sequence[Batch],
    losses: Losses,
) -> None:
    """Sum losses and gradients over all groups, in place."""
    with timeline.phase("sync"):
        group.sum([*losses.values(), *gradients()])


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
