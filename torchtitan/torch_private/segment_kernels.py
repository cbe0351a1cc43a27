"""Attention within segments of a sequence: documents, sliding windows, parts on other ranks.

Memory is linear in the length of the sequence, and time follows the segments. The kernels:

    segments that are whole rows, causal  that of plain causal attention, one call
    others in 16 bits on CUDA             flash, packed one after the other: a call for each band
    others                                the fused kernel, on views: a call for each

What is the same in all rows is one call for all. A band that the fused kernel cannot express is cut
into blocks of queries with a small mask each. Long documents stay packed: cuDNN, which computes
plain attention on Hopper, prepares an execution plan for each new length.

Shapes: B batch, S queries, T keys, H query heads, K key/value heads, E head dim.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchtitan.torch_private.attention_kernels import (
    attention_backward,
    attention_forward,
    flash_can,
)


class Segment(NamedTuple):
    """A range of queries and a range of keys of one row, and which of them see each other.

    Query i and key j do if 0 <= i + `shift` - j < `window`; for window 0, without the upper limit.
    """

    row: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    shift: int = 0
    window: int = 0

    def trimmed(self) -> Self:
        """Return the segment without queries that see no key, and keys that no query sees."""
        (start, stop), (first, last) = self.queries, self.keys
        start = max(start, first - self.shift)
        if self.window:
            stop = min(stop, last - 1 + self.window - self.shift)
            first = max(first, start + self.shift - self.window + 1)
        last = min(last, stop + self.shift)
        return self._replace(queries=(start, max(start, stop)), keys=(first, max(first, last)))

    @property
    def band(self) -> tuple[int, ...]:
        """Sizes and offset that determine which queries and keys see each other."""
        (start, stop), (first, last) = self.queries, self.keys
        return stop - start, last - first, start + self.shift - first, self.window

    @property
    def is_cut(self) -> bool:
        """Whether the window hides a key from a query of this trimmed segment."""
        return 0 < self.window <= self.queries[1] - 1 + self.shift - self.keys[0]

    @property
    def is_rectangle(self) -> bool:
        """Whether each query of this trimmed segment sees all keys."""
        return not self.is_cut and self.queries[0] + self.shift >= self.keys[1] - 1

    @property
    def is_causal(self) -> bool:
        """Whether the n-th query of this trimmed segment sees the first n keys, and no others."""
        (start, stop), shift = self.queries, self.shift
        return not self.is_cut and (start + shift, stop + shift) == self.keys


def segments_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment]
) -> tuple[Tensor, Tensor]:
    """Compute attention of queries to the keys that they see, each in at most one segment.

    Args:
        q: (B, H, S, E).
        k, v: (B, K, T, E); each serves H/K query heads.

    Returns:
        The output (B, H, S, E), and the log-sum-exp of the scores (B, H, S) in float32 or wider;
        zeros and minus infinity for queries that see no key.
    """
    if _are_causal_rows(segments, q, k):
        out, lse = attention_forward(q, k, v, causal=True, bias=None)
        return _with_tokens_first(out), lse.contiguous()
    if has_varlen_kernels(q.device.type, q.dtype, q.shape[-1]):
        return _packed_forward(q, k, v, tuple(segments))
    out = tokens_first(q).zero_()
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide(q))
    for rows, tile, bias in _tiles(segments, q):
        queries, keys = slice(*tile.queries), slice(*tile.keys)
        out[rows, :, queries], lse[rows, :, queries] = attention_forward(
            q[rows, :, queries],
            k[rows, :, keys],
            v[rows, :, keys],
            causal=tile.is_causal,
            bias=bias,
        )
    return out, lse


def segments_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Sequence[Segment],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v in `segments_forward`.

    `out` and `lse` may come from attention over more keys than these; the result is then the
    contribution of these keys to the gradients.
    """
    if _are_causal_rows(segments, q, k):
        grads = attention_backward(grad_out, q, k, v, out, lse, causal=True, bias=None)
        of_q, of_k, of_v = map(_with_tokens_first, grads)
        return of_q, of_k, of_v
    if has_varlen_kernels(q.device.type, q.dtype, q.shape[-1]):
        return _packed_backward(grad_out, q, k, v, out, lse, tuple(segments))
    grad_q = tokens_first(q).zero_()
    grad_k, grad_v = (tokens_first(kv, wide(kv)).zero_() for kv in (k, v))  # tiles share keys
    for rows, tile, bias in _tiles(segments, q):
        queries, keys = slice(*tile.queries), slice(*tile.keys)
        of_q, of_k, of_v = attention_backward(
            grad_out[rows, :, queries],
            q[rows, :, queries],
            k[rows, :, keys],
            v[rows, :, keys],
            out[rows, :, queries],
            lse[rows, :, queries],
            causal=tile.is_causal,
            bias=bias,
        )
        grad_q[rows, :, queries] = of_q
        grad_k[rows, :, keys] += of_k
        grad_v[rows, :, keys] += of_v
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which attention is accumulated: float32 or wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def tokens_first(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of the shape (B, H, S, E), in memory (B, S, H, E)."""
    batch, heads, length, dim = tensor.shape
    return tensor.new_empty(batch, length, heads, dim, dtype=dtype).transpose(1, 2)


def _with_tokens_first(tensor: Tensor) -> Tensor:
    """Return the tensor in the memory format of `tokens_first`."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _are_causal_rows(segments: Sequence[Segment], q: Tensor, k: Tensor) -> bool:
    """Whether segments are all rows of `q` and `k`, each with causal attention."""
    span = (0, q.shape[2])
    return len(segments) == len(q) and all(
        (each.queries, each.keys) == (span, (0, k.shape[2])) and each.is_causal for each in segments
    )


def _of_rows(segments: Sequence[Segment], rows: int) -> Iterator[tuple[slice, Segment]]:
    """Yield segments with their row, and once with all rows those that all rows have."""
    counts = Counter(segment._replace(row=0) for segment in segments)
    for segment in segments:
        if counts[segment._replace(row=0)] < rows:
            yield slice(segment.row, segment.row + 1), segment
        elif segment.row == 0:
            yield slice(None), segment


def _tiles(
    segments: Sequence[Segment], q: Tensor
) -> Iterator[tuple[slice, Segment, Tensor | None]]:
    """Cut segments into those that a kernel can compute, with a small mask if at all."""
    bias, band = None, None
    for rows, segment in _of_rows(segments, len(q)):
        whole = segment.trimmed()
        if whole.is_causal or whole.is_rectangle:
            block = max(1, whole.queries[1] - whole.queries[0])
        else:
            block = min(max(MIN_BLOCK, whole.window // 4), MAX_BLOCK)
        for start in range(*whole.queries, block):
            stop = min(start + block, whole.queries[1])
            tile = whole._replace(queries=(start, stop)).trimmed()
            if tile.band != band:  # all blocks in the middle of a segment share a mask
                bias, band = _bias(tile, q), tile.band
            yield rows, tile, bias


MIN_BLOCK, MAX_BLOCK = 64, 256
"""Limits of queries per mask: few cost more calls of the kernel, many compute hidden scores."""


def _bias(tile: Segment, q: Tensor) -> Tensor | None:
    """Return the additive mask of a trimmed segment (1, 1, queries, keys), where it needs one.

    It is finite: kernels differ in their results for minus infinity.
    """
    if tile.is_causal or tile.is_rectangle:
        return None
    (start, stop), (first, last) = tile.queries, tile.keys
    distance = start + tile.shift - first  # of the first query from the first key
    low = q.new_full((stop - start, last - first), torch.finfo(q.dtype).min / 2)
    bias = low.triu(distance + 1)
    return (bias + low.tril(distance - tile.window) if tile.window else bias)[None, None]


def has_varlen_kernels(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether segments are packed into few calls of the flash kernel."""
    return device_type == "cuda" and flash_can(dtype, head_dim) and torch.version.hip is None


class PackedRows(NamedTuple):
    """Tokens of many segments, one segment after the other."""

    places: Tensor | None
    """Index of each token among those of all rows; None: they are all tokens, in order."""
    offsets: Tensor
    """Number of tokens before each segment, and of all, in int32."""
    longest: int


class VarlenLayout(NamedTuple):
    """Segments in one call of the flash kernel, which aligns bands with the ends of segments.

    In a segment of N queries and M keys, query n sees the keys from n + M - N - `left` to
    n + M - N + `right`; -1: no limit.
    """

    queries: PackedRows
    keys: PackedRows
    left: int
    right: int


@lru_cache(maxsize=256)  # all layers have the same segments, forward and backward
def varlen_layouts(
    segments: tuple[Segment, ...], rows: int, queries: int, keys: int, device: torch.device
) -> list[VarlenLayout]:
    """Pack segments of `rows` rows, with `queries` and `keys` each."""
    bands: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        part = segment.trimmed()
        (start, stop), (_, last), shift = part.queries, part.keys, part.shift
        if start == stop:
            continue
        right = stop + shift - last
        left = part.window - 1 - right if part.window else -1
        if right:  # limits that hide nothing would only make more calls
            left = left if part.is_cut else -1
            right = right if start + shift < last - 1 else -1
        bands.setdefault((left, right), []).append(part)
    return [
        VarlenLayout(
            _packed([(part.row, *part.queries) for part in parts], rows, queries, device),
            _packed([(part.row, *part.keys) for part in parts], rows, keys, device),
            *band,
        )
        for band, parts in bands.items()
    ]


def _packed(
    ranges: Sequence[tuple[int, int, int]], rows: int, length: int, device: torch.device
) -> PackedRows:
    """Pack ranges of rows of `length` tokens: row, first token, end."""
    lengths = [stop - start for _, start, stop in ranges]
    offsets = list(itertools.accumulate(lengths, initial=0))
    starts = [row * length + start for row, start, _ in ranges]
    places = None
    if starts != offsets[:-1] or offsets[-1] < rows * length:
        spans = zip(starts, lengths, strict=True)
        places = _moved(torch.cat([torch.arange(s, s + count) for s, count in spans]), device)
    return PackedRows(
        places, _moved(torch.tensor(offsets, dtype=torch.int32), device), max(lengths)
    )


def _moved(host: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` without waiting for it."""
    pinned = host.pin_memory() if device.type == "cuda" else host
    return pinned.to(device, non_blocking=True)


def _flat(tensor: Tensor, tokens: PackedRows | None = None) -> Tensor:
    """Return the tokens of all rows, or those packed, of (B, H, S, E): (tokens, H, E)."""
    flat = tensor.transpose(1, 2).flatten(0, 1)
    return flat if tokens is None or tokens.places is None else flat[tokens.places]


def _packed_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: tuple[Segment, ...]
) -> tuple[Tensor, Tensor]:
    rows, heads, length, _ = q.shape
    layouts = varlen_layouts(segments, rows, length, k.shape[2], q.device)
    results = [
        flash_forward(
            _flat(q, layout.queries), _flat(k, layout.keys), _flat(v, layout.keys), layout
        )
        for layout in layouts
    ]
    if len(layouts) == 1 and layouts[0].queries.places is None:
        ((out, lse),) = results
    else:
        out = _flat(tokens_first(q)).zero_()
        lse = q.new_full((heads, rows * length), -torch.inf, dtype=wide(q))
        for layout, (of_pack, lse_of_pack) in zip(layouts, results, strict=True):
            assert layout.queries.places is not None, "a query is in at most one segment"
            out.index_copy_(0, layout.queries.places, of_pack)
            lse.index_copy_(1, layout.queries.places, lse_of_pack)
    out, lse = out.view(rows, length, heads, -1), lse.view(heads, rows, length)
    return out.transpose(1, 2), lse.transpose(0, 1).contiguous()


def _packed_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: tuple[Segment, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    rows, sums = len(q), list[Tensor | None]([None] * 3)
    flat_lse = lse.transpose(0, 1).flatten(1)  # (H, B S)
    for layout in varlen_layouts(segments, rows, q.shape[2], k.shape[2], q.device):
        chosen = layout.queries.places
        shares = flash_backward(
            _flat(grad_out, layout.queries),
            _flat(q, layout.queries),
            _flat(k, layout.keys),
            _flat(v, layout.keys),
            _flat(out, layout.queries),
            flat_lse if chosen is None else flat_lse[:, chosen],
            layout,
        )
        tokens = (layout.queries, layout.keys, layout.keys)
        given = zip(sums, shares, (q, k, v), tokens, strict=True)
        sums = [_add(total, share, whole, packed) for total, share, whole, packed in given]
    grad_q, grad_k, grad_v = (
        tokens_first(x).zero_()
        if total is None
        else total.to(x.dtype).view(rows, -1, *total.shape[1:]).transpose(1, 2)
        for total, x in zip(sums, (q, k, v), strict=True)
    )
    return grad_q, grad_k, grad_v


def _add(total: Tensor | None, share: Tensor, whole: Tensor, packed: PackedRows) -> Tensor:
    """Add the gradients of packed tokens to those of all tokens of `whole` (B, H, S, E)."""
    if total is None and packed.places is None:
        return share
    if total is None:
        total = _flat(tokens_first(whole, wide(whole)).zero_())
    total, share = total.to(wide(whole)), share.to(wide(whole))
    return total + share if packed.places is None else total.index_add_(0, packed.places, share)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, layout: VarlenLayout) -> tuple[Tensor, Tensor]:
    """Compute attention of packed queries (tokens, H, E); log-sum-exp (H, tokens) in float32."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_arguments(layout), return_debug_mask=False, **_band(layout)
    )
    return out, lse


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: VarlenLayout,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v in `flash_forward`."""
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # without effect
    grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        *_arguments(layout),
        random_state,
        torch.empty(0, device=q.device),
        **_band(layout),
    )
    return grad_q, grad_k, grad_v


def _arguments(layout: VarlenLayout) -> tuple[Tensor, Tensor, int, int, float, bool]:
    queries, keys, left, right = layout
    longest = (queries.longest, keys.longest)
    return queries.offsets, keys.offsets, *longest, 0.0, (left, right) == (-1, 0)


def _band(layout: VarlenLayout) -> dict[str, int]:
    return {"window_size_left": layout.left, "window_size_right": layout.right}
