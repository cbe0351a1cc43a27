"""Recompute activations in the backward pass instead of keeping them (Chen et al., 2016,
arXiv:1604.06174).

`full` keeps only the input of each block. `selective` with a number k treats every k-th block of
the model so; with "op" it treats every block, but keeps what is dear to recompute for its size:
attention, every second matrix product, and a rank's part of what ranks add up (the measure of
Korthikanti et al., 2022, arXiv:2205.05198, section 5).
`memory_budget` leaves the choice to the compiler, which keeps what saves the most time within a
part of the memory that keeping everything would take: a knapsack problem over the block's graph.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan.config import Config
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.settings import ParallelismConfig
from torchtitan.parallel.sharding import ShardingConfig
from torchtitan.torch_private.compiler import (
    compiles_recomputed_attention,
    set_activation_memory_budget,
)


class ActivationCheckpointConfig(Config):
    """Which activations are recomputed rather than kept."""

    mode: Literal["none", "full", "selective", "memory_budget"] = Field(
        "selective",
        description="none: keep all; full: keep block inputs; selective: see option; "
        "memory_budget: let the compiler choose.",
    )
    selective_ac_option: Annotated[int, Field(ge=1)] | Literal["op"] = Field(
        2,
        description='With mode = "selective": "op" keeps attention and every second matrix '
        "product of each block; a number k treats every k-th block whole.",
    )
    memory_budget: float = Field(
        0.5,
        ge=0,
        le=1,
        description='With mode = "memory_budget": the part of the activations of a compiled block '
        "that may be kept; 0 keeps its inputs, 1 all that the compiler would.",
    )

    @property
    def by_operator(self) -> bool:
        return self.mode == "selective" and self.selective_ac_option == "op"

    @property
    def every(self) -> int:
        """One block of so many is recomputed, the first among them; 0: none."""
        if self.mode not in ("full", "selective"):
            return 0
        option = self.selective_ac_option
        return option if self.mode == "selective" and option != "op" else 1


def problems(
    config: ActivationCheckpointConfig,
    compile: CompileConfig,
    parallelism: ParallelismConfig,
    sharding: ShardingConfig,
    device_type: str | None,
) -> Iterator[tuple[str, str]]:
    """What cannot work together, as (key, message); device_type None: not known yet."""
    key = "activation_checkpoint.mode"
    if config.mode == "memory_budget" and not compile.compiles("model"):
        message = (
            "the compiler chooses what to keep, so it needs compile.enable = true with "
            '"model" in compile.components'
        )
        yield key, message
    elif config.mode == "memory_budget" and compile.backend == "eager":
        yield key, 'compile.backend = "eager" leaves the backward as it is; use "inductor"'
    # Context parallelism attends by an operator of its own, which this does not concern.
    on_a_mesh = parallelism.tensor_parallel_degree > 1 or sharding.in_graph
    on_a_mesh = on_a_mesh and parallelism.context_parallel_degree == 1
    recomputes_attention = config.every > 0 and not config.by_operator
    if (
        recomputes_attention
        and on_a_mesh
        and compile.compiles("model")
        and not compiles_recomputed_attention(device_type or "cuda")
    ):
        message = (
            "on a CPU this version of torch cannot compile a block that is split over tensor "
            "ranks, or gathered in the graph as by simple_fsdp, and recomputes its attention; use "
            'mode = "selective" with selective_ac_option = "op", or leave "model" out of '
            "compile.components"
        )
        yield key, message


def apply(
    blocks: Mapping[str, nn.Module], order: Sequence[str], config: ActivationCheckpointConfig
) -> list[str]:
    """Replace the forward of the blocks that `config` picks; parameter names stay as they are.

    Args:
        blocks: those of this part of the model, by name.
        order: the names of all blocks of the model, so that the choice is the same however it is
            cut into parts.

    Returns:
        The names of the blocks that recompute.
    """
    if config.mode == "memory_budget":
        set_activation_memory_budget(config.memory_budget)
    chosen = set(order[:: config.every]) if config.every else set()
    names = [name for name in blocks if name in chosen]
    for name in names:
        _recompute(blocks[name], config.by_operator)
    return names


def _recompute(block: nn.Module, by_operator: bool) -> None:
    context: dict[str, Any] = {"context_fn": _keep_dear_operators} if by_operator else {}
    forward = block.forward

    # A function of ours, since the compiler would pass over a `partial` of one of torch's.
    def recomputed(*inputs: Tensor | None) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **context)

    block.forward = recomputed


def _keep_dear_operators() -> Any:
    """Contexts of one block's forward and recomputation.

    The counter of matrix products is theirs alone, so no block's choice depends on another's.
    """
    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default}
    dear = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.torchtitan.context_attention.default,
        # A rank's part of a sum is small, and every rank waits for it; a gathered whole is large.
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
    seen = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in dear
        if op in products:
            phase = "recompute" if context.is_recompute else "forward"
            seen[phase] += 1
            keep = seen[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
