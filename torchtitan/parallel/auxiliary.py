"""Losses beside the main one: those of blocks (`torchtitan.models.output.AuxiliaryLoss`), and those
that a recipe adds (`torchtitan.auxiliary`).

A block may be on a stage of a pipeline that knows no loss. So its own joins the gradient where it
is: what the block hands on passes unchanged, and in the backward the loss gets the gradient that it
has in the total, weight / (units of the global batch). So does one that is made of the outputs: it
joins that of the main loss.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.auxiliary import AuxiliaryLossConfig
from torchtitan.models.output import AuxiliaryLoss, auxiliary_losses
from torchtitan.torch_private.autograd import is_in_backward


class _WithGradient(torch.autograd.Function):
    """`x`, from whose backward `total` gets `scale` as its gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, total: Tensor, scale: Tensor) -> Tensor:
        context.save_for_backward(scale.to(total.dtype))
        return x.data  # no view: one that leaves a stage cannot be detached there

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = context.saved_tensors
        return gradient, scale, None


class AuxiliaryLosses:
    """Those of this rank's parts of a model, summed up over the microbatches of a step."""

    def __init__(self, names: Sequence[str], configs: Iterable[AuxiliaryLossConfig] = ()) -> None:
        """
        Args:
            names: those of the whole model, so that all ranks report the same.
            configs: what a recipe adds, some of which is in the model.
        """
        self.configs = list(configs)
        self.sums: dict[str, Tensor] | None = None
        self.weighted: dict[str, Tensor] = {}
        self.count = torch.ones(())
        self.weights: dict[str, float] = {}
        self.partial: list[str] = []
        self.group: ProcessGroup | None = None
        self.begin(1)
        self.names = sorted({*names, *self.weights})

    def attach(
        self, parts: Iterable[nn.Module], blocks: Iterable[nn.Module], group: ProcessGroup | None
    ) -> None:
        """Have the modules of these parts report here.

        Args:
            blocks: those of them whose losses are of this rank's part of a sequence.
            group: ranks with the other parts (tp), if there are any.
        """
        for module in (module for part in parts for module in auxiliary_losses(part)):
            module.core = self._add
        if group is not None:
            self.group = group
            inside = (module for block in blocks for module in auxiliary_losses(block))
            self.partial = sorted({module.name for module in inside})

    def begin(self, step: int) -> None:
        """The weights of this step."""
        for config in self.configs:
            self.weights |= config.weights(step)

    @contextmanager
    def recording(self, count: Tensor) -> Iterator[dict[str, Tensor]]:
        """For the passes of a step with `count` units in its global batch.

        Afterwards, what it gave has this rank's shares: of each by name, and as "loss" of all of
        them times their weights.
        """
        shares: dict[str, Tensor] = {}
        zero = torch.zeros((), dtype=torch.float32, device=count.device)
        self.count = count
        self.sums, self.weighted = ({name: zero.clone() for name in self.names} for _ in range(2))
        try:
            yield shares
            if self.partial:
                self._add_up_parts(self.sums, self.weighted)
            shares["loss"] = sum(self.weighted.values(), zero) / count
            shares.update({f"loss/{name}": total / count for name, total in self.sums.items()})
        finally:
            self.sums = None

    def _add_up_parts(self, *sums: dict[str, Tensor]) -> None:
        """Make those of parts of sequences sums of the whole."""
        mine = torch.stack([each[name] for each in sums for name in self.partial])
        dist.all_reduce(mine, group=self.group)
        for each, totals in zip(sums, mine.chunk(len(sums)), strict=True):
            each.update(zip(self.partial, totals, strict=True))

    def add(self, name: str, loss: Tensor, total: Callable[[], Tensor]) -> Tensor:
        """The main loss, with the gradient of another beside it.

        Args:
            loss: of a microbatch (0-d).
            total: gives the sum of the other over the same units (0-d).
        """
        weight = self.weights[name]
        with torch.set_grad_enabled(torch.is_grad_enabled() and weight > 0):
            return loss if self.sums is None else self._join(name, weight, loss, total())

    def _add(self, loss: AuxiliaryLoss, x: Tensor, total: Tensor) -> Tensor:
        if self.sums is None:  # nothing is trained
            return x
        return self._join(loss.name, self.weights.get(loss.name, loss.weight), x, total)

    def _join(self, name: str, weight: float, x: Tensor, total: Tensor) -> Tensor:
        assert self.sums is not None
        if not is_in_backward():  # else it is computed again, and is counted already
            self.sums[name] += total.detach()
            self.weighted[name] += weight * total.detach() if weight else 0.0
        if not weight:
            return x
        trained: Tensor = _WithGradient.apply(x, total, weight / self.count)  # type: ignore[no-untyped-call]
        return trained
