"""Attention over heads that are projected and rotated already: the part models share.

It is a module with a replaceable `core`, because what distributes a sequence over ranks has to
compute attention differently, and everything else about a model the same.

Shapes: B batch, S sequence, H query heads, K key/value heads, E head dim.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AttentionMask = Literal["causal", "block_causal"]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Each token attends to itself and to what precedes it, in its own document if given.

    Args:
        q: (B, H, S, E).
        k, v: (B, K, S, E); each serves H/K query heads.
        documents: (B, S) int64, the document of each token; None: all are one.

    Returns:
        (B, H, S, E).
    """
    if q.is_cuda and (documents is not None or q.dtype == torch.float32):
        # Of the kernels that serve several heads with one of k and v, those that take a mask or
        # float32 make all scores, S x S of each head.
        heads = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(heads, dim=1), v.repeat_interleave(heads, dim=1)
    if documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=document_mask(documents)[:, None], enable_gqa=True
    )


def document_mask(documents: Tensor) -> Tensor:
    """Which tokens see which: (B, S, S) bool, query before key."""
    same = documents[:, :, None] == documents[:, None, :]
    return same & torch.ones_like(same[0]).tril()


class SelfAttention(nn.Module):
    """Causal self-attention, whole on one device until `core` is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.core: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = causal_attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        return self.core(q, k, v, documents)


def attends(model: nn.Module) -> bool:
    """Whether tokens of `model` see each other by `SelfAttention`."""
    return any(isinstance(module, SelfAttention) for module in model.modules())
