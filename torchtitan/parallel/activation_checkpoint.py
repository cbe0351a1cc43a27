"""Recompute activations in the backward pass instead of keeping them (Chen et al., 2016,
arXiv:1604.06174).

`full` keeps only the input of each block. `selective` with a number k treats every k-th block;
with "op" it treats every block, but keeps what is dear to recompute: attention, and every second
matrix product.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan.config import Config


class ActivationCheckpointConfig(Config):
    """Which activations are recomputed rather than kept."""

    mode: Literal["none", "full", "selective"] = Field(
        "selective", description="none: keep all; full: keep block inputs; selective: see option."
    )
    selective_ac_option: Annotated[int, Field(ge=1)] | Literal["op"] = Field(
        2,
        description='With mode = "selective": "op" keeps attention and every second matrix '
        "product of each block; a number k treats every k-th block whole.",
    )


def apply(blocks: Sequence[nn.Module], config: ActivationCheckpointConfig) -> int:
    """Wrap the forward of the blocks that `config` picks; parameter names stay as they are.

    Returns:
        The number of blocks wrapped.
    """
    if config.mode == "none":
        return 0
    every = 1
    context: dict[str, Any] = {}
    if config.mode == "selective" and config.selective_ac_option == "op":
        context["context_fn"] = _keep_dear_operators
    elif config.mode == "selective":
        every = int(config.selective_ac_option)
    chosen = blocks[::every]
    for block in chosen:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context)
    return len(chosen)


def _keep_dear_operators() -> Any:
    """Contexts of one block's forward and recomputation.

    The counter of matrix products is theirs alone, so no block's choice depends on another's.
    """
    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default}
    attention = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    seen = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in attention
        if op in products:
            phase = "recompute" if context.is_recompute else "forward"
            seen[phase] += 1
            keep = seen[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
