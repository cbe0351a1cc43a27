"""Attention over projected and rotated heads, shared by the models.

It is a module with a replaceable `core`, because distributing a sequence over ranks changes how
attention is computed, and nothing else in a model.

Shapes: B batch, S sequence, H query heads, K key/value heads, E head dim.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from torchtitan.torch_private.segment_kernels import (
    Segment,
    has_varlen_kernels,
    segments_backward,
    segments_forward,
    tokens_first,
    wide,
)

AttentionMask = Literal["causal", "block_causal"]

Core = Callable[[Tensor, Tensor, Tensor, Tensor | None, int, Tensor | None], Tensor]
"""Function of q, k, v, documents, window and sinks, as `causal_attention`."""


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of each token to itself and to earlier tokens of its document.

    Args:
        q: (B, H, S, E).
        k, v: (B, K, S, E); each serves H/K query heads.
        documents: (B, S) int64 on the CPU; adjacent tokens with equal numbers are a document. None:
            all are one.
        window: number of most recent tokens that a token attends to, itself included; 0: all.
        sinks: (H,), an extra logit in the softmax of each head, whose value is zero.

    Returns:
        (B, H, S, E).
    """
    assert documents is None or documents.is_cpu, "their boundaries are read without waiting"
    if documents is not None or sinks is not None or 0 < window < q.shape[2]:
        out: Tensor = document_attention(q, k, v, documents, window, sinks)[0]
        return out
    if q.is_cuda and q.dtype == torch.float32:
        # With grouped heads in float32, the kernels materialize all scores, S x S per head.
        heads = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(heads, dim=1), v.repeat_interleave(heads, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention to the keys that a mask (B, 1, S, T) bool shows; a sink is one more key.

    Its key and its value are zeros, so its score is what the mask adds.
    """
    if sinks is not None:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        scores = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        shape = (len(mask), len(sinks), q.shape[2], -1)
        of_sinks = sinks.to(q.dtype).view(1, -1, 1, 1).expand(*shape[:3], 1)
        mask = torch.cat((scores.expand(shape), of_sinks), dim=-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Let attention to all keys, with its log-sum-exp, also go to sinks; changes `out` in place.

    With these two results, the backward of attention gives the gradients of q, k and v.
    """
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])  # (B, H, S)
    return out.mul_((lse - total).exp()[..., None]), total


def gradient_of_sinks(
    grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None
) -> Tensor | None:
    """Return the gradient (H,) from the results of `add_sinks`; None without sinks."""
    if sinks is None:
        return None
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # (B, H, S)
    return -(share * (grad_out.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)


@torch.library.custom_op("torchtitan::document_attention", mutates_args=())
def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `causal_attention` in memory linear in S, and time by the lengths of documents.

    It is an operator so that compiled blocks can contain it and recomputation can skip it.

    Returns:
        The output (B, H, S, E), and the log-sum-exp of the scores (B, H, S) in float32 or wider.
    """
    return add_sinks(*segments_forward(q, k, v, _segments(q, documents, window)), sinks)


@document_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return tokens_first(q), q.new_empty(q.shape[:3], dtype=wide(q))


@torch.library.custom_op("torchtitan::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v."""
    return segments_backward(grad_out, q, k, v, out, lse, _segments(q, documents, window))


@document_attention_backward.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tokens_first(q), tokens_first(k), tokens_first(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, sinks = inputs
    ctx.save_for_backward(*tensors, *output, sinks)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, sinks = ctx.saved_tensors
    gradients = document_attention_backward(grad_out, *tensors, ctx.window)
    return *gradients, None, None, gradient_of_sinks(grad_out, tensors[-2], tensors[-1], sinks)


document_attention.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.torchtitan.document_attention)
def _(q: torch.Size, k: Any, v: Any, documents: Any, window: int, *_: Any, **__: Any) -> int:
    """Count two products, so that a memory budget knows the price of recomputation."""
    return 2 * _product(q, window)


@register_flop_formula(torch.ops.torchtitan.document_attention_backward)
def _(grad_out: Any, q: torch.Size, *rest: Any, **_: Any) -> int:
    return 5 * _product(q, rest[-1])


def _product(q: torch.Size, window: int) -> int:
    """Count the FLOPs of a product, as torch does: as if no token were hidden but by the window."""
    return 2 * math.prod(q) * min(window or q[2], q[2])


def _segments(q: Tensor, documents: Tensor | None, window: int) -> tuple[Segment, ...]:
    rows, length = q.shape[0], q.shape[2]
    if documents is None:
        return tuple(Segment(row, (0, length), (0, length), 0, window) for row in range(rows))
    return _segments_of(document_starts(documents), window)


@lru_cache(maxsize=16)
def _segments_of(starts: tuple[tuple[int, ...], ...], window: int) -> tuple[Segment, ...]:
    return tuple(
        Segment(row, span, span, 0, window)
        for row, bounds in enumerate(starts)
        for span in pairwise(bounds)
    )


def document_starts(documents: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the first position of each document of each row of (B, S), then S.

    All layers have the same documents, so the result is kept with the tensor, which is equal to
    itself alone as a key; its version changes with its elements.
    """
    return _starts(documents, documents._version)


@lru_cache(maxsize=16)  # microbatches in flight
def _starts(documents: Tensor, version: int) -> tuple[tuple[int, ...], ...]:
    changes = ((row[1:] != row[:-1]).nonzero()[:, 0] + 1 for row in documents)
    return tuple((0, *found.tolist(), documents.shape[1]) for found in changes)


class SelfAttention(nn.Module):
    """Causal self-attention, whole on one device until `core` is replaced."""

    def __init__(self, window: int = 0) -> None:
        """`window`: number of most recent tokens that a token attends to; 0: all."""
        super().__init__()
        self.window = window
        self.core: Core = causal_attention

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        return self.core(q, k, v, documents, self.window, sinks)


def attends(model: nn.Module) -> bool:
    """Whether `model` uses `SelfAttention`."""
    return any(isinstance(module, SelfAttention) for module in model.modules())


def describe(
    window: int,
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    separates_documents: bool,
    is_mixed: bool = False,
    has_sinks: bool = False,
) -> str | None:
    """Return the mask of attention, and the kernel that computes it; None if it is only causal.

    Args:
        is_mixed: whether some blocks have no window.
    """
    masks = ["within documents"] * separates_documents
    where = " in some blocks" if is_mixed else ""
    masks += [f"in a window of {window:,} tokens{where}"] * (window > 0)
    masks += ["with sinks"] * has_sinks
    is_packed = has_varlen_kernels(device_type, dtype, head_dim)
    kernel = "varlen flash attention" if is_packed else "fused kernels, segment by segment"
    return f"{', '.join(masks)}, by {kernel}" if masks else None
