"""Computes with the parts of a model that this rank has: the whole, or the stages of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from torchtitan.parallel.auxiliary import AuxiliaryLosses
from torchtitan.parallel.sharding import Sharding
from torchtitan.tasks import Batch
from torchtitan.tasks.task import LossFunction
from torchtitan.timeline import Timeline

Losses = dict[str, Tensor]
"""Shares of this rank in global means, by name (0-d, detached): the ranks of `loss` add them up.

"loss" is what is trained on, and `loss/<name>` an auxiliary one."""


class Executor(Protocol):
    """Computes with the parts of a model."""

    def forward_backward(self, batches: Sequence[Batch], count: Tensor) -> Losses: ...
    def evaluate(self, batches: Sequence[Batch]) -> Tensor: ...
    def outputs(self, batch: Batch) -> Tensor | None: ...


@dataclass(frozen=True)
class SingleStage:
    """A model that is whole on every rank, as far as the pipeline is concerned."""

    model: nn.Module
    loss: LossFunction | None
    """None: the model gives it."""
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
        """What the model makes of a batch."""
        return cast(Tensor, self.model(batch.inputs, **batch.context()))

    def _loss(self, batch: Batch) -> Tensor:
        known = batch.context()
        if self.loss is None:
            return cast(Tensor, self.model(batch.inputs, **known, targets=batch.targets))
        return self.loss(self.model(batch.inputs, **known), batch.targets)
