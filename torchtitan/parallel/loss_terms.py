"""Auxiliary losses, from blocks (`torchtitan.models.output.AuxiliaryLoss`) and from the recipe
(`torchtitan.auxiliary_losses`).

A block may be on a pipeline stage that computes no loss. Its auxiliary loss therefore enters the
gradient at the block: the block's output passes through unchanged, and in the backward the loss
receives its gradient in the total, weight / (units of the global batch). A loss of the outputs does
the same at the main loss.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.auxiliary_losses import AuxiliaryLossConfig
from torchtitan.models.output import AuxiliaryLoss, auxiliary_losses
from torchtitan.torch_private.runtime import is_in_backward


class _WithGradient(torch.autograd.Function):
    """Identity of `x` whose backward passes `scale` to `total` as its gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, total: Tensor, scale: Tensor) -> Tensor:
        context.save_for_backward(scale.to(total.dtype))
        return x.data  # not a view: a stage cannot detach one

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = context.saved_tensors
        return gradient, scale, None


class AuxiliaryLosses:
    """Auxiliary losses of this rank's parts of a model, summed over the microbatches of a step."""

    def __init__(self, names: Sequence[str], configs: Iterable[AuxiliaryLossConfig] = ()) -> None:
        """
        Args:
            names: names of all auxiliary losses of the model, so that all ranks report the same.
            configs: losses that the recipe adds, some of which are in the model.
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
        """Collect the auxiliary losses of the modules in `parts`.

        Args:
            blocks: modules whose losses cover only this rank's part of a sequence.
            group: ranks with the other parts of the sequence (tp), if any.
        """
        for module in (module for part in parts for module in auxiliary_losses(part)):
            module.core = self._add
        if group is not None:
            self.group = group
            inside = (module for block in blocks for module in auxiliary_losses(block))
            self.partial = sorted({module.name for module in inside})

    def begin(self, step: int) -> None:
        """Set the weights for this step."""
        for config in self.configs:
            self.weights |= config.weights(step)

    @contextmanager
    def recording(self, count: Tensor) -> Iterator[dict[str, Tensor]]:
        """Record losses during the passes of a step with `count` units in its global batch.

        On exit the yielded dict has this rank's share of each loss by name, and of their weighted
        sum as "loss".
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
        """Sum the losses of parts of sequences over the ranks that share them."""
        mine = torch.stack([each[name] for each in sums for name in self.partial])
        dist.all_reduce(mine, group=self.group)
        for each, totals in zip(sums, mine.chunk(len(sums)), strict=True):
            each.update(zip(self.partial, totals, strict=True))

    def add(self, name: str, loss: Tensor, total: Callable[[], Tensor]) -> Tensor:
        """Return the main loss, with the gradient of an auxiliary loss attached.

        Args:
            loss: main loss of a microbatch (0-d).
            total: returns the sum of the auxiliary loss over the same units (0-d).
        """
        weight = self.weights[name]
        with torch.set_grad_enabled(torch.is_grad_enabled() and weight > 0):
            return loss if self.sums is None else self._join(name, weight, loss, total())

    def _add(self, loss: AuxiliaryLoss, x: Tensor, total: Tensor) -> Tensor:
        if self.sums is None:  # not training
            return x
        return self._join(loss.name, self.weights.get(loss.name, loss.weight), x, total)

    def _join(self, name: str, weight: float, x: Tensor, total: Tensor) -> Tensor:
        assert self.sums is not None
        if not is_in_backward():  # a recomputation is already counted
            self.sums[name] += total.detach()
            self.weighted[name] += weight * total.detach() if weight else 0.0
        if not weight:
            return x
        trained: Tensor = _WithGradient.apply(x, total, weight / self.count)  # type: ignore[no-untyped-call]
        return trained
