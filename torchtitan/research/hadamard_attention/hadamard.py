"""The Walsh-Hadamard transform of the last dim: y = x H / sqrt(n), with n a power of two.

H has elements of 1 and -1 and orthogonal rows, so a row with one large element becomes one with
elements of similar size, which share a scale well. It is the Kronecker product of smaller ones,

    H = H256 x H256 x ... x Hr,  r < 256

so with the last dim viewed as several of size 256, it is a product with the matrix of size 256
along each of them (as in HadaCore: Agarwal et al., 2024, arXiv:2412.08832, with matrices of 16, the
size of tensor cores). Usual head sizes take one product. Smaller matrices would take fewer
operations but more time: with 16, rows of 128 took 24 times as long on an H100 as a dense product
in bf16, and 3 times as long on a CPU as that product in float32.
The transform is symmetric and its own inverse, and so its own gradient.
"""

import math
from itertools import takewhile

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
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if size == 1:
        return wide
    y = wide.reshape(*x.shape[:-1], *factors(size))
    for dim in range(x.ndim - 1, y.ndim):
        y = (y.transpose(dim, -1) @ _matrix(y.shape[dim], y)).transpose(dim, -1)
    return y.reshape(x.shape) / math.sqrt(size)


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
