"""Computes with the parts of a model that this rank has: the whole, or the stages of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from torchtitan.data import Batch
from torchtitan.parallel.loss import LossFunction
from torchtitan.parallel.sharding import Sharding
from torchtitan.timeline import Timeline


class Executor(Protocol):
    """Computes with the parts of a model."""

    def forward_backward(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor: ...
    def evaluate(self, batches: Sequence[Batch]) -> Tensor: ...


@dataclass(frozen=True)
class SingleStage:
    """A model that is whole on every rank, as far as the pipeline is concerned."""

    model: nn.Module
    loss: LossFunction | None
    """None: the model gives it."""
    sharding: Sharding
    document_mask: bool
    timeline: Timeline

    def forward_backward(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        share = torch.zeros((), device=tokens.device)
        for batch in batches:
            self.sharding.before_backward(is_last=batch is batches[-1])
            with self.timeline.phase("forward"):
                loss = self._loss(batch) / tokens
            with self.timeline.phase("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            share += loss.detach()
        return share

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        return torch.stack([self._loss(batch) for batch in batches]).sum()

    def _loss(self, batch: Batch) -> Tensor:
        documents = batch.documents if self.document_mask else None
        known = (batch.tokens, batch.positions, documents)
        if self.loss is None:
            return cast(Tensor, self.model(*known, batch.targets))
        return self.loss(self.model(*known), batch.targets)
