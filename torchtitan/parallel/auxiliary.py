"""Losses that blocks of a model add to the main one (`torchtitan.models.output.AuxiliaryLoss`).

A block may be on a stage of a pipeline that knows no loss. So its own joins the gradient where it
is: what the block hands on passes unchanged, and in the backward the loss gets the gradient that it
has in the total, weight / (units of the global batch).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models.output import AuxiliaryLoss, auxiliary_losses
from torchtitan.torch_private.autograd import is_in_backward


class _WithGradient(torch.autograd.Function):
    """`x`, from whose backward `total` gets `scale` as its gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, total: Tensor, scale: Tensor) -> Tensor:
        context.scale = scale.to(total.dtype)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, context.scale, None


class AuxiliaryLosses:
    """Those of this rank's parts of a model, summed up over the microbatches of a step."""

    def __init__(self, names: Sequence[str], parts: Sequence[nn.Module]) -> None:
        """`names` are those of the whole model, so that all ranks report the same."""
        self.names = names
        self.sums: dict[str, Tensor] | None = None
        self.count = self.weighted = torch.ones(())
        for module in (module for part in parts for module in auxiliary_losses(part)):
            module.core = self._add

    @contextmanager
    def recording(self, count: Tensor) -> Iterator[dict[str, Tensor]]:
        """For the passes of a step with `count` units in its global batch.

        Afterwards, what it gave has this rank's shares: of each by name, and as "loss" of all of
        them times their weights.
        """
        shares: dict[str, Tensor] = {}
        zero = torch.zeros((), dtype=torch.float32, device=count.device)
        self.count, self.weighted = count, zero.clone()
        self.sums = {name: zero.clone() for name in self.names}
        try:
            yield shares
            shares["loss"] = self.weighted / count
            shares.update({f"loss/{name}": total / count for name, total in self.sums.items()})
        finally:
            self.sums = None

    def _add(self, loss: AuxiliaryLoss, x: Tensor, total: Tensor) -> Tensor:
        if self.sums is None:  # nothing is trained
            return x
        if not is_in_backward():  # else it is computed again, and is counted already
            self.sums[loss.name] += total.detach()
            self.weighted += loss.weight * total.detach() if loss.weight else 0.0
        if not loss.weight:
            return x
        trained: Tensor = _WithGradient.apply(x, total, loss.weight / self.count)  # type: ignore[no-untyped-call]
        return trained
