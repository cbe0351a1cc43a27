"""What a step is made of: its batches, the loss over all ranks, the update, and the one agreement.

`torchtitan.build` puts them together with the hooks of `torchtitan.features`, which `Trainer.step`
does not see.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from torchtitan.data import Batch
from torchtitan.optim import Optimizers
from torchtitan.parallel import ParallelModel, World
from torchtitan.timeline import Timeline

Losses = dict[str, Tensor]
"""Global means by name, 0-d and equal on all ranks; "loss" is what is trained on."""


@dataclass(frozen=True)
class StepBatch:
    """What this rank trains on in one step."""

    microbatches: list[Batch]
    """On the device, and of whole sequences."""
    count: Tensor
    """0-d: targets that count in the global batch."""


@dataclass
class StepStatus:
    """What all ranks know of a step, the same to the bit, before its update is applied."""

    losses: Losses
    grad_norm: Tensor
    """Where replicas run apart, the largest of theirs."""
    highest_loss: float
    """Of all ranks; infinite where one of them is not finite."""
    highest_norm: float
    count: int
    """Targets of the global batch."""
    notes: dict[str, str | float] = field(default_factory=dict)
    """What the metrics of the step say besides."""
    is_skipped: bool = False
    """Whether the update is not applied."""
    is_void: bool = False
    """Whether the step does not count at all, and is done again."""


class Batches(Protocol):
    """An endless iterator over the steps' batches."""

    def __next__(self) -> StepBatch: ...

    @property
    def close(self) -> Callable[[], None]:
        """Stops the threads that read ahead."""


class RankBatches:
    """Reads this rank's microbatches of each step, and counts the targets of all ranks."""

    def __init__(
        self,
        stream: Iterator[Batch],
        accumulation: int,
        world: World,
        timeline: Timeline,
        close: Callable[[], None],
        before_step: Sequence[Callable[[], None]],
    ) -> None:
        """
        Args:
            accumulation: microbatches of a step.
            close: closes the source of the stream.
            before_step: calls to make before anything is read.
        """
        self.stream, self.accumulation, self.close = stream, accumulation, close
        self.world, self.timeline, self.before_step = world, timeline, before_step

    def __next__(self) -> StepBatch:
        for call in self.before_step:
            call()
        with self.timeline.phase("data"):
            read = [next(self.stream) for _ in range(self.accumulation)]
        batches = [batch.to(self.world.device.torch_device) for batch in read]
        counts = torch.stack([batch.count() for batch in batches])
        with self.timeline.phase("sync"):
            count = self.world.sum(counts.sum(), over="data")
        return StepBatch(batches, count)


class StepModel(Protocol):
    """The model as a step sees it."""

    @property
    def parts(self) -> list[nn.Module]: ...
    def forward_backward(self, batch: StepBatch) -> Losses: ...


class GlobalLosses:
    """The parallel model, whose shares of the loss are added up over ranks."""

    def __init__(self, model: ParallelModel, world: World, timeline: Timeline) -> None:
        self.model, self.world, self.timeline = model, world, timeline

    @property
    def parts(self) -> list[nn.Module]:
        """This rank's parts of the network."""
        return self.model.parts

    def forward_backward(self, batch: StepBatch) -> Losses:
        """Forward and backward of a step; gradients accumulate."""
        shares = self.model.forward_backward(batch.microbatches, batch.count)
        with self.timeline.phase("sync"):
            means = self.world.sum(torch.stack(list(shares.values())), over="loss")
        return dict(zip(shares, means, strict=True))


class ReplicaLosses(GlobalLosses):
    """A parallel model of which each copy makes updates of its own.

    Its gradient is that of the mean over its own targets; losses are global means all the same, of
    which each copy's weights have their share.
    """

    def forward_backward(self, batch: StepBatch) -> Losses:
        """Forward and backward of a step; gradients accumulate."""
        count = torch.stack([each.count() for each in batch.microbatches]).sum()
        with self.timeline.phase("sync"):
            own = self.world.sum(count, over="dp_shard").clamp(min=1)
        shares = self.model.forward_backward(batch.microbatches, own)
        with self.timeline.phase("sync"):
            means = torch.stack(list(shares.values())) * (own / batch.count)
            means = self.world.sum(means, over="loss")
        return dict(zip(shares, means, strict=True))


class HookedModel:
    """A model with calls before and after its forward and backward."""

    def __init__(
        self,
        inner: StepModel,
        before: Sequence[Callable[[StepBatch], None]],
        after: Sequence[Callable[[StepBatch], None]],
    ) -> None:
        self.inner, self.before, self.after = inner, before, after

    @property
    def parts(self) -> list[nn.Module]:
        """The parts of the network on this rank."""
        return self.inner.parts

    def forward_backward(self, batch: StepBatch) -> Losses:
        """Run the inner model between the calls."""
        for call in self.before:
            call(batch)
        losses = self.inner.forward_backward(batch)
        for call in self.after:
            call(batch)
        return losses


class StepOptimizers:
    """The optimizers as a step sees them."""

    def __init__(
        self,
        optimizers: Optimizers,
        max_norm: float,
        timeline: Timeline,
        norm_of_all: Callable[[Tensor], Tensor] | None = None,
        before_update: Sequence[Callable[[], None]] = (),
        after_update: Sequence[Callable[[], None]] = (),
    ) -> None:
        """
        Args:
            max_norm: limit of the global gradient norm; 0: none.
            norm_of_all: takes the norm of these ranks, and returns that of all replica groups.
            before_update: calls to make before weights change.
            after_update: calls to make after they have changed.
        """
        self.inner, self.max_norm, self.timeline = optimizers, max_norm, timeline
        self.norm_of_all = norm_of_all
        self.before_update, self.after_update = before_update, after_update

    def begin(self, factor: float) -> float:
        """Drop the gradients, and set the rates to `factor` times their peak; returns the rate."""
        if self.inner.in_backward:
            self._before_update()
        return self.inner.begin(factor)

    def norm(self) -> Tensor:
        """The global norm of the gradients, 0-d."""
        with self.timeline.phase("clip"):
            norm = self.inner.norm()
            return self.norm_of_all(norm) if self.norm_of_all else norm

    def step(self, norm: Tensor, highest_norm: float) -> None:
        """Update the parameters, by gradients that are clipped to the limit of their norm.

        Args:
            norm: what `norm` gave.
            highest_norm: the highest of all ranks. It is known without waiting for the device, and
                well below the limit it spares passing over all gradients to multiply them by 1.
        """
        self._before_update()
        with self.timeline.phase("optimizer"):
            if self.max_norm > 0 and highest_norm > 0.99 * self.max_norm:
                self.inner.clip(self.max_norm, norm)
            self.inner.step()
            for call in self.after_update:
                call()
            if self.after_update:
                self.inner.weights_changed()

    def _before_update(self) -> None:
        for call in self.before_update:
            call()


class UpdateGuard(Protocol):
    """Decides whether the update of a step is applied."""

    def accepts(self, status: StepStatus) -> bool: ...


@dataclass(frozen=True)
class Flag:
    """A number that components of all ranks agree on with the step: the largest is what counts."""

    mine: Callable[[], float]
    agreed: Callable[[float], None]


class Agreement:
    """The one wait for the device in a step.

    All ranks then have read the same numbers, so they decide alike whether to apply the update, and
    whether to stop.
    """

    def __init__(
        self, world: World, timeline: Timeline, flags: Sequence[Flag], norms_differ: bool = False
    ) -> None:
        """`norms_differ` says that ranks may come with other gradient norms."""
        self.world, self.timeline, self.flags = world, timeline, flags
        self.norms_differ = norms_differ

    def __call__(self, losses: Losses, grad_norm: Tensor, count: Tensor) -> StepStatus:
        """What all ranks know of the step; the flags are handed on."""
        loss = losses["loss"]
        # Offloaded gradients have theirs in host memory.
        grad_norm = grad_norm.to(loss.device)
        flags = [torch.full_like(loss, float(flag.mine())) for flag in self.flags]
        with self.timeline.phase("sync"):
            mine = torch.stack([each.double() for each in (loss, grad_norm, count, *flags)])
            finite = mine.nan_to_num(torch.inf, posinf=torch.inf, neginf=torch.inf)
            highest_loss, highest_norm, counted, *agreed = self.world.max(finite).tolist()
        for flag, value in zip(self.flags, agreed, strict=True):
            flag.agreed(value)
        if self.norms_differ:
            grad_norm = torch.full_like(grad_norm, highest_norm)
        return StepStatus(losses, grad_norm, highest_loss, highest_norm, int(counted))
