"""Turns a single-device model into this rank's part of a run, in one visible order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from torchtitan.config import Config
from torchtitan.data import Batch
from torchtitan.losses import cross_entropy
from torchtitan.parallel import activation_checkpoint, compile, fsdp
from torchtitan.parallel.activation_checkpoint import ActivationCheckpointConfig
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.fsdp import Precision
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


class ParallelismConfig(Config):
    """How many ranks each technique uses; -1 is whatever is left."""

    data_parallel_replicate_degree: int = Field(
        1, ge=1, description="Copies of the model: DDP alone, HSDP together with sharding."
    )
    data_parallel_shard_degree: int = Field(
        -1, ge=-1, description="Parts the parameters are split into (FSDP); -1: all ranks left."
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = Field(
        "default",
        description="Free a block's parameters after its forward: always, never, or (default) "
        "for all blocks but the last.",
    )
    tensor_parallel_degree: int = Field(1, ge=1, description="Ranks that share each matrix.")
    disable_loss_parallel: bool = Field(
        False, description="Gather the logits instead of sharing the loss over tensor ranks."
    )
    pipeline_parallel_degree: int = Field(1, ge=1, description="Ranks in the pipeline.")
    pipeline_parallel_schedule: str = Field("1F1B", description="Order of the microbatches.")
    pipeline_parallel_microbatch_size: int = Field(
        1, ge=1, description="Sequences in a pipeline microbatch."
    )
    context_parallel_degree: int = Field(1, ge=1, description="Ranks that share a sequence.")

    def degrees(self, world_size: int) -> Degrees:
        """The sizes of all axes for `world_size` ranks, -1 resolved (to 0 if it cannot be)."""
        fixed = (
            self.pipeline_parallel_degree
            * self.data_parallel_replicate_degree
            * self.context_parallel_degree
            * self.tensor_parallel_degree
        )
        shard = self.data_parallel_shard_degree
        return Degrees(
            pp=self.pipeline_parallel_degree,
            dp_replicate=self.data_parallel_replicate_degree,
            dp_shard=world_size // fixed if shard == -1 else shard,
            cp=self.context_parallel_degree,
            tp=self.tensor_parallel_degree,
        )


@dataclass(frozen=True)
class Layout:
    """Every choice about how a model is laid out and computed."""

    precision: Precision
    reshard: fsdp.ReshardPolicy
    cpu_offload: bool
    activation_checkpoint: ActivationCheckpointConfig
    compile: CompileConfig


@dataclass(frozen=True)
class ParallelModel:
    """This rank's parts of the model and what can be done with them."""

    parts: list[nn.Module]
    loss: LossFunction
    sharded: "list[FSDPModule]"

    def forward_backward(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        """Forward and backward of the microbatches of one step; gradients accumulate.

        Args:
            batches: this rank's microbatches.
            tokens: 0-d, the targets that count in the global batch.

        Returns:
            This rank's share of the global mean loss (0-d, detached): the shares add up to it.
        """
        (model,) = self.parts
        share = torch.zeros((), device=tokens.device)
        for batch in batches:
            fsdp.reduce_after(self.sharded, is_last=batch is batches[-1])
            loss = self.loss(model(batch.tokens), batch.targets) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            share += loss.detach()
        return share

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Sum of the loss over the targets of `batch` (0-d)."""
        (model,) = self.parts
        return self.loss(model(batch.tokens), batch.targets)


def parallelize(
    model: nn.Module, blocks: Sequence[nn.Module], layout: Layout, world: World
) -> ParallelModel:
    """Apply every technique to `model`, in order.

    The order is policy: recomputation is inside what is compiled, and both are inside the unit
    that is gathered and reduced.
    """
    activation_checkpoint.apply(blocks, layout.activation_checkpoint)
    compile.apply(blocks, layout.compile)
    if _has_work(layout, world):
        fsdp.apply(
            model,
            blocks,
            world.mesh["dp_replicate", "dp_shard"],
            precision=layout.precision,
            reshard=layout.reshard,
            cpu_offload=layout.cpu_offload,
            pin_memory=world.device.type == "cuda",
        )
    loss: LossFunction = cross_entropy
    if layout.compile.enable and "loss" in layout.compile.components:
        loss = torch.compile(cross_entropy, backend=layout.compile.backend)
    return ParallelModel([model], loss, fsdp.sharded_modules(model))


def _has_work(layout: Layout, world: World) -> bool:
    """With one data rank and one dtype there is nothing to gather, to reduce or to cast."""
    precision = layout.precision
    return world.degrees.data > 1 or layout.cpu_offload or precision.compute != precision.parameters
