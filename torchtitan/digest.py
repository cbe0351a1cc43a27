"""Digest of a tensor that is the sum of the digests of its shards, under any sharding.

An element's bits, as signed words of at most 32 bits, are multiplied by a pseudo-random weight of
64 bits for the index along each dimension; the digest is the sum over all elements, modulo 2^64
(multilinear hashing, https://arxiv.org/abs/1202.4961). So exchanging two elements, rows or columns
changes it, and the order of summation does not. It guards against accidents, not attacks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Word types by the size of an element; 8 bytes are two words, as if the last dimension were
twice as long."""
CHUNKS = {"cpu": 2**15}
"""Number of words multiplied at once: as many as fit a core's cache, or fill a device."""
CHUNK = 2**23


def digest(tensor: Tensor, offsets: Sequence[int] | None = None) -> Tensor:
    """Compute the digest of a shard that starts at `offsets` of the whole: int64, 0-d."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    at = [0] * tensor.ndim if offsets is None else list(offsets)
    if not tensor.ndim:
        tensor, at = tensor.reshape(1), [0]
    if tensor.dtype.itemsize == 8:
        tensor, at[-1] = tensor.contiguous(), 2 * at[-1]
    words = tensor.detach().view(WORDS[tensor.dtype.itemsize])
    *of_rows, of_columns = (
        _weights(dim, start, size, tensor.device)
        for dim, (start, size) in enumerate(zip(at, words.shape, strict=True))
    )
    of_row = torch.ones(1, dtype=torch.int64, device=tensor.device)
    for weights in of_rows:
        of_row = (of_row[:, None] * weights).flatten()
    chunk = CHUNKS.get(tensor.device.type, CHUNK)
    height = max(1, chunk // words.shape[-1])
    rows = words.reshape(-1, words.shape[-1])
    for block, row_weights in zip(
        torch.split(rows, height), torch.split(of_row, height), strict=True
    ):
        columns = zip(torch.split(block, chunk, 1), torch.split(of_columns, chunk), strict=True)
        for part, weights in columns:
            total += ((part * weights).sum(1) * row_weights).sum()
    return total


def unsigned(value: int) -> int:
    """Return the 64 bits of an int64, or of a sum of them, as a non-negative number."""
    return value % 2**64


def _weights(dim: int, start: int, size: int, device: torch.device) -> Tensor:
    """Return the weights of indices along a dimension, from the SplitMix64 generator."""
    state = torch.arange(start, start + size, dtype=torch.int64, device=device)
    state = state * signed(0x9E3779B97F4A7C15) + signed((dim + 1) * 0xD1B54A32D192ED03)
    state = (state ^ _shifted(state, 30)) * signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def _shifted(values: Tensor, by: int) -> Tensor:
    """Shift right by a number of bits, filling with zeros."""
    return values.bitwise_right_shift(by).bitwise_and(2 ** (64 - by) - 1)


def signed(value: int) -> int:
    """Return the int64 with the bits of a non-negative number of 64 bits."""
    return (value + 2**63) % 2**64 - 2**63
