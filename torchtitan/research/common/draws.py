"""Random numbers drawn on a device by counter, the same on every layout."""

import math

import torch
from torch import Tensor

from torchtitan.research.common.codec import seed_of


def normal(rows: int, columns: int, name: str, device: torch.device) -> Tensor:
    """Draw normal numbers (rows, columns) in float64, for `name`: by pairs (Box and Muller, 1958).

    Devices may round the logarithm and the cosine differently.
    """
    counters = torch.arange(rows * columns, device=device)
    # 53 of 62 bits, and never 0, of which there is no logarithm.
    drawn = [mixed(counters, seed_of(f"{name}/{n}")) >> 9 for n in range(2)]
    one, other = ((each.double() + 0.5) / 2**53 for each in drawn)
    found: Tensor = (-2 * one.log()).sqrt() * (2 * math.pi * other).cos()
    return found.view(rows, columns)


def mixed(counters: Tensor, seed: int) -> Tensor:
    """Return random integers from 0 to 2**62 - 1 by counter: SplitMix64 (Steele et al., 2014)."""
    value = (counters + 1) * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # Torch shifts signed integers with sign extension.
        value = (value ^ (value >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return (value ^ (value >> 31 & (1 << 33) - 1)) & (1 << 62) - 1


def _signed(number: int) -> int:
    """Return the signed 64-bit number with the bits of an unsigned one."""
    return number - (number >> 63 << 64)
