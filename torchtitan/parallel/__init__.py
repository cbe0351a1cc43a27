"""Turns a single-device model into this rank's part of a run, in one visible order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from torchtitan.data import Batch
from torchtitan.losses import cross_entropy, vocabulary_parallel_cross_entropy
from torchtitan.models.spec import Args, ModelSpec
from torchtitan.parallel import activation_checkpoint, compile, fsdp, tensor
from torchtitan.parallel.activation_checkpoint import ActivationCheckpointConfig
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.fsdp import Precision
from torchtitan.parallel.settings import ParallelismConfig
from torchtitan.parallel.world import CommConfig, Degrees, Launch, World, open_world

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "ActivationCheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "Degrees",
    "Launch",
    "Layout",
    "ParallelModel",
    "ParallelismConfig",
    "Precision",
    "World",
    "open_world",
    "parallelize",
]

LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """Every choice about how a model is laid out and computed."""

    parallelism: ParallelismConfig
    precision: Precision
    cpu_offload: bool
    activation_checkpoint: ActivationCheckpointConfig
    compile: CompileConfig
    seq_len: int
    local_batch_size: int
    accumulation: int
    document_mask: bool
    """Whether attention stays within a document."""


class Runner(Protocol):
    """Computes with the parts of a model."""

    def forward_backward(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor: ...
    def evaluate(self, batches: Sequence[Batch]) -> Tensor: ...


@dataclass(frozen=True)
class Plain:
    """A model that is whole on every rank, as far as the pipeline is concerned."""

    model: nn.Module
    loss: LossFunction
    sharded: "list[FSDPModule]"
    document_mask: bool

    def forward_backward(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        share = torch.zeros((), device=tokens.device)
        for batch in batches:
            fsdp.reduce_after(self.sharded, is_last=batch is batches[-1])
            loss = self._loss(batch) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            share += loss.detach()
        return share

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        return torch.stack([self._loss(batch) for batch in batches]).sum()

    def _loss(self, batch: Batch) -> Tensor:
        documents = batch.documents if self.document_mask else None
        return self.loss(self.model(batch.tokens, batch.positions, documents), batch.targets)


@dataclass(frozen=True)
class ParallelModel:
    """This rank's parts of the model and what can be done with them."""

    parts: list[nn.Module]
    runner: Runner
    cut: Callable[[Batch], Batch]
    """From whole sequences to this rank's part of them."""

    def forward_backward(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        """Forward and backward of the microbatches of one step; gradients accumulate.

        Args:
            batches: this rank's microbatches, of whole sequences.
            tokens: 0-d, the targets that count in the global batch.

        Returns:
            This rank's share of the global mean loss (0-d, detached): over the ranks of `loss`
            the shares add up to it.
        """
        share = self.runner.forward_backward([self.cut(batch) for batch in batches], tokens)
        tensor.settle(parameter for part in self.parts for parameter in part.parameters())
        return share

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """This rank's share of the sum of the loss over the targets of `batches` (0-d).

        There are as many batches as in a training step, each of the same size.
        """
        return self.runner.evaluate([self.cut(batch) for batch in batches])


def parallelize(
    model: nn.Module, spec: ModelSpec[Args], args: Args, layout: Layout, world: World
) -> ParallelModel:
    """Apply every technique to `model`, in order.

    The order is policy: what is cut is split, recomputation is inside what is compiled, and both
    are inside the unit that is gathered and reduced.
    """
    chosen, degrees = layout.parallelism, world.degrees
    parts = [model]
    for part in parts:
        blocks = list(spec.blocks(part).values())
        if degrees.tp > 1:
            tensor.apply(
                part,
                spec.tensor_plan,
                world.mesh["tp"],
                sequence_parallel=not chosen.disable_sequence_parallel,
                loss_parallel=not chosen.disable_loss_parallel,
            )
        activation_checkpoint.apply(blocks, layout.activation_checkpoint)
        compile.apply(blocks, layout.compile)
        if _has_work(layout, world):
            fsdp.apply(
                part,
                blocks,
                world.data_mesh,
                precision=layout.precision,
                reshard=chosen.fsdp_reshard_after_forward,
                cpu_offload=layout.cpu_offload,
                pin_memory=world.device.type == "cuda",
            )
    loss = _loss(layout, world, args.vocab_size)
    runner = Plain(parts[0], loss, fsdp.sharded_modules(parts[0]), layout.document_mask)
    return ParallelModel(parts, runner, lambda batch: batch)


def _loss(layout: Layout, world: World, vocabulary: int) -> LossFunction:
    loss: LossFunction = cross_entropy
    if world.degrees.tp > 1 and not layout.parallelism.disable_loss_parallel:
        group = world.groups["tp"]
        loss = partial(vocabulary_parallel_cross_entropy, group=group, vocabulary=vocabulary)
    if layout.compile.enable and "loss" in layout.compile.components:
        loss = torch.compile(loss, backend=layout.compile.backend)
    return loss


def _has_work(layout: Layout, world: World) -> bool:
    """With one data rank and one dtype there is nothing to gather, to reduce or to cast."""
    precision = layout.precision
    casts = precision.compute != precision.parameters
    return world.data_mesh.size() > 1 or layout.cpu_offload or casts
