"""Runs the parts of a model that this rank has: the whole model, or its pipeline stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from torchtitan.parallel.loss_terms import AuxiliaryLosses
from torchtitan.parallel.sharding import Sharding
from torchtitan.tasks import Batch
from torchtitan.tasks.task import LossFunction
from torchtitan.timeline import Timeline

Losses = dict[str, Tensor]
"""This rank's shares of global means, by name (0-d, detached), to be summed over the `loss` ranks.

"loss" is the training objective, and `loss/<name>` an auxiliary loss."""


class Executor(Protocol):
    """Interface for forward and backward passes through this rank's parts of a model."""

    def forward_backward(self, batches: Sequence[Batch], count: Tensor) -> Losses: ...
    def evaluate(self, batches: Sequence[Batch]) -> Tensor: ...
    def outputs(self, batch: Batch) -> Tensor | None: ...


@dataclass(frozen=True)
class SingleStage:
    """Executor of a model that is not split into pipeline stages."""

    model: nn.Module
    loss: LossFunction | None
    """Loss of the outputs; None: the model computes its own."""
    sharding: Sharding
    auxiliary: AuxiliaryLosses
    timeline: Timeline

    def forward_backward(self, batches: Sequence[Batch], count: Tensor) -> Losses:
        share = torch.zeros((), device=count.device)
        with self.auxiliary.recording(count) as shares:
            for batch in batches:
                self.sharding.before_backward(is_last=batch is batches[-1])
                with self.timeline.phase("forward"):
                    loss = self._loss(batch) / count
                with self.timeline.phase("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
                share += loss.detach()
        return shares | {"loss": share + shares["loss"]}

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        return torch.stack([self._loss(batch) for batch in batches]).sum()

    def outputs(self, batch: Batch) -> Tensor | None:
        """Return the model's outputs for a batch."""
        return cast(Tensor, self.model(batch.inputs, **batch.context()))

    def _loss(self, batch: Batch) -> Tensor:
        known = batch.context()
        if self.loss is None:
            return cast(Tensor, self.model(batch.inputs, **known, targets=batch.targets))
        return self.loss(self.model(batch.inputs, **known), batch.targets)
