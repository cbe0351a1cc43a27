"""Computes with the parts of a model that this rank has: the whole, or the stages of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from torchtitan.data import Batch
from torchtitan.parallel import fsdp
from torchtitan.parallel.loss import LossFunction
from torchtitan.timeline import Timeline

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


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
    sharded: "list[FSDPModule]"
    document_mask: bool
    timeline: Timeline

    def forward_backward(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        share = torch.zeros((), device=tokens.device)
        for batch in batches:
            fsdp.reduce_after(self.sharded, is_last=batch is batches[-1])
            with self.timeline.phase("forward"):
                loss = self._loss(batch) / tokens
            with self.timeline.phase("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            share += loss.detach()
        return share

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        total = torch.stack([self._loss(batch) for batch in batches]).sum()
        for module in self.sharded:
            # Else the next forward would use what is gathered, also after an update.
            module.reshard()
        return total

    def _loss(self, batch: Batch) -> Tensor:
        documents = batch.documents if self.document_mask else None
        known = (batch.tokens, batch.positions, documents)
        if self.loss is None:
            return cast(Tensor, self.model(*known, batch.targets))
        return self.loss(self.model(*known), batch.targets)
