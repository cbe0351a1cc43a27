"""Attention over projected and rotated heads, shared by the models.

It is a module with a replaceable `core`, because distributing a sequence over ranks changes how
attention is computed, and nothing else in a model.

Shapes: B batch, S sequence, H query heads, K key/value heads, E head dim.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AttentionMask = Literal["causal", "block_causal"]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Compute attention of each token to itself and to earlier tokens of its document.

    Args:
        q: (B, H, S, E).
        k, v: (B, K, S, E); each serves H/K query heads.
        documents: (B, S) int64, the document of each token; None: all are one.

    Returns:
        (B, H, S, E).
    """
    if q.is_cuda and (documents is not None or q.dtype == torch.float32):
        # With grouped heads and a mask or float32, the kernels materialize all scores, S x S per
        # head.
        heads = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(heads, dim=1), v.repeat_interleave(heads, dim=1)
    if documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=document_mask(documents)[:, None], enable_gqa=True
    )


def document_mask(documents: Tensor) -> Tensor:
    """Return the mask of visible tokens: (B, S, S) bool, query before key."""
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
    """Whether `model` uses `SelfAttention`."""
    return any(isinstance(module, SelfAttention) for module in model.modules())
