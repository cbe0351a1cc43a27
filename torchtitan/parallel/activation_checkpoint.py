"""Recompute activations in the backward pass instead of keeping them (Chen et al., 2016,
arXiv:1604.06174).

`full` keeps only the input of each block, and the experts that its tokens chose. `selective` with a
number k treats every k-th block of the model this way; with "op" it treats every block, but keeps
what is expensive to recompute for its size: attention, every second matrix product, and a rank's
part of a sum over ranks (the criterion of Korthikanti et al., 2022, arXiv:2205.05198, section 5).
`memory_budget` leaves the choice to the compiler, which keeps what saves the most time within a
fraction of the memory needed to keep everything: a knapsack problem over the block's graph.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan.config import Config
from torchtitan.models.experts import Router
from torchtitan.torch_private.compiler import set_activation_memory_budget


class ActivationCheckpointConfig(Config):
    """Activation checkpointing: the activations to recompute in the backward pass."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "selective"
    """Activations to keep. none: all (no checkpointing); full: only block inputs; selective: see
    selective_ac_option; memory_budget: the compiler chooses."""
    selective_ac_option: Annotated[int, Field(ge=1)] | Literal["op"] = 2
    """With mode = "selective": "op" keeps attention and every second matrix product of each block;
    a number k recomputes every k-th block completely."""
    memory_budget: float = Field(0.5, ge=0, le=1)
    """With mode = "memory_budget": fraction of the activations of a compiled block to keep; 0 keeps
    only its inputs, 1 everything that the compiler would keep."""

    @property
    def by_operator(self) -> bool:
        return self.mode == "selective" and self.selective_ac_option == "op"

    @property
    def every(self) -> int:
        """Interval between recomputed blocks, starting with the first; 0 disables recomputation."""
        if self.mode not in ("full", "selective"):
            return 0
        option = self.selective_ac_option
        return option if self.mode == "selective" and option != "op" else 1


def apply(
    blocks: Mapping[str, nn.Module],
    order: Sequence[str],
    config: ActivationCheckpointConfig,
    *,
    is_compiled: bool = False,
) -> list[str]:
    """Replace the forward of the blocks selected by `config`, without renaming parameters.

    Args:
        blocks: blocks of this part of the model, by name.
        order: names of all blocks of the model, so that the choice does not depend on the
            pipeline stages.
        is_compiled: whether blocks will be compiled.

    Returns:
        The names of the recomputed blocks.
    """
    set_activation_memory_budget(config.memory_budget if config.mode == "memory_budget" else 1.0)
    chosen = set(order[:: config.every]) if config.every else set()
    names = [name for name in blocks if name in chosen]
    for name in names:
        context: dict[str, Any] = {}
        if config.by_operator:
            context = {"context_fn": _save_expensive_operators}
        elif any(isinstance(module, Router) for module in blocks[name].modules()):
            context = {"context_fn": _choices_in_graph if is_compiled else _choices}
        _recompute(blocks[name], context)
    return names


def _recompute(block: nn.Module, context: Mapping[str, Any]) -> None:
    forward = block.forward

    # A function of our own: the compiler would skip a `partial` of one of torch's.
    def recomputed(*inputs: Tensor | None) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **context)

    block.forward = recomputed


KEPT_OPERATORS = set[Any]()
"""Operators whose results selective recomputation keeps too, from modules that define them."""
ALWAYS_KEPT_OPERATORS = {torch.ops.torchtitan.choose_experts.default}
"""Operators whose results any recomputation keeps: choices that it must not make again."""


class _Remembering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the results of operators in which a recomputation must not differ."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in ALWAYS_KEPT_OPERATORS:
            self.kept.append(out)
        return out


class _Repeating(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns what was kept, in order, in each recomputation: a split backward has several."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.left = kept, iter(kept)

    def __enter__(self) -> Any:
        self.left = iter(self.kept)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ALWAYS_KEPT_OPERATORS:
            return next(self.left)
        return func(*args, **(kwargs or {}))


def _choices() -> tuple[_Remembering, _Repeating]:
    """Create the contexts of the forward and recomputations of a block with experts."""
    kept: list[Any] = []
    return _Remembering(kept), _Repeating(kept)


def _choices_in_graph() -> Any:
    """Create the same contexts for a compiler, which knows only torch's own."""
    return create_selective_checkpoint_contexts([*ALWAYS_KEPT_OPERATORS])  # type: ignore[no-untyped-call]


def _save_expensive_operators() -> Any:
    """Create the contexts of one block's forward and recomputation.

    Each block counts its own matrix products, so its choice does not depend on other blocks.
    """
    aten = torch.ops.aten
    experts = torch.ops.torchtitan.expert_products.default
    products = {aten.mm.default, aten.addmm.default, experts}
    expensive = (
        KEPT_OPERATORS
        | ALWAYS_KEPT_OPERATORS
        | {
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            torch.ops.torchtitan.context_attention.default,
            torch.ops.torchtitan.document_attention.default,
            # A reduce-scatter's output is small and blocks every rank; an all-gather's is large.
            torch.ops._c10d_functional.reduce_scatter_tensor.default,
        }
    )
    seen = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in expensive
        if op in products:
            phase = "recompute" if context.is_recompute else "forward"
            seen[phase] += 1
            keep = seen[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
