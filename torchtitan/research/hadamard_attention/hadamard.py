"""The Walsh-Hadamard transform of the last dim: y = x H / sqrt(n), with n a power of two.

H has elements of 1 and -1 and orthogonal rows, so a row with one large element becomes one with
elements of similar size, which share a scale well. It is the Kronecker product of smaller ones,

    H = H256 x H256 x ... x Hr,  r < 256

so with the last dim viewed as several of size 256, it is a product with the matrix of size 256
along each of them (as in HadaCore: Agarwal et al., 2024, arXiv:2412.08832, with matrices of 16, the
size of tensor cores). Usual head sizes take one product. Smaller matrices would take fewer
operations but more time: with 16, rows of 128 took 24 times as long on an H100 as a dense product
in bf16, and 3 times as long on a CPU as that product in float32.

On CUDA the products are in 16 bits and are summed in float32, as 1 and -1 are exact in 16 bits. A
factor in float32 is split into two in bf16, whose sum has 16 of its 24 bits: more than any format
to which the result is rounded. The transform is symmetric and its own inverse, and so its own
gradient.
"""

import math
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

STEP = 256
"""Size of the factor matrices; the last may be smaller."""


def hadamard(x: Tensor) -> Tensor:
    """Multiply `x` (..., n) by the normalised matrix, in float32 or wider; returned in that dtype.

    Raises:
        ValueError: if n is not a power of two.
    """
    size = x.shape[-1]
    if not is_power_of_two(size):
        raise ValueError(f"the last dim is {size}; a Hadamard transform needs a power of two")
    y: Tensor = _Transform.apply(x)  # type: ignore[no-untyped-call]
    return y


class _Transform(torch.autograd.Function):
    """The transform, which is its own gradient; `mm` has none for a sum in another dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        size = x.shape[-1]
        y = x.reshape(*x.shape[:-1], *factors(size))
        for dim in range(x.ndim - 1, y.ndim):
            y = _times_matrix(y.transpose(dim, -1)).transpose(dim, -1)
        wide = torch.promote_types(x.dtype, torch.float32)
        return y.reshape(x.shape).to(wide) / math.sqrt(size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return hadamard(grad)


def _times_matrix(x: Tensor) -> Tensor:
    """Multiply `x` (..., r) by the matrix of size r: float32 or wider."""
    if not _sums_in_float32(x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide @ _matrix(x.shape[-1], wide)
    rows = x.reshape(-1, x.shape[-1])
    first, *others = [rows] if x.dtype.itemsize == 2 else _in_two(rows)
    matrix = _matrix(x.shape[-1], first)
    y = _product(first, matrix)
    for rest in others:
        y = y + _product(rest, matrix)
    return y.view(x.shape)


def _sums_in_float32(x: Tensor) -> bool:
    """Whether there is a product of matrices in 16 bits that is summed in float32."""
    return x.device.type == "cuda" and x.dtype != torch.float64


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices in 16 bits: float32."""
    return torch.mm(a, b, out_dtype=torch.float32)


def _in_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split a tensor in float32 into two in bf16 that add up to it, nearly."""
    first = x.bfloat16()
    return first, (x - first.float()).bfloat16()


def is_power_of_two(size: int) -> bool:
    """Whether `size` is a power of two, so that the transform exists."""
    return size > 0 and size & (size - 1) == 0


def factors(size: int) -> list[int]:
    """Factor a power of two into 256s and a remainder."""
    rests = takewhile(lambda rest: rest > 1, (size // STEP**i for i in range(size.bit_length())))
    return [min(rest, STEP) for rest in rests]


def _matrix(size: int, like: Tensor) -> Tensor:
    """Return the matrix, whose sign at row i and column j is the parity of the bits of i & j."""
    index = torch.arange(size, device=like.device)
    common = index[:, None] & index
    parity = torch.zeros_like(common)
    for bit in range(size.bit_length()):
        parity ^= common >> bit & 1
    return (1 - 2 * parity).to(like.dtype)
