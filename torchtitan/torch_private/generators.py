"""Random generators on the CPU that have more than torch keeps of a seed."""

from hashlib import shake_256

import torch

WORDS = 624
"""Words of 32 bits in the state of a Mersenne Twister."""
FIRST = 24
"""Byte of a generator's state at which they start, each in 8 bytes."""


def generator_of(name: str) -> torch.Generator:
    """A generator whose whole state is a hash of a name.

    `manual_seed` keeps 32 bits of a seed, by which two of 100,000 names are likely to draw alike.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    state = generator.get_state()
    assert len(state) == 5056, "torch keeps the state of a generator in another form"
    digest = shake_256(name.encode()).digest(4 * WORDS)
    words = torch.frombuffer(bytearray(digest), dtype=torch.int32).to(torch.int64)
    state[FIRST : FIRST + 8 * WORDS].view(torch.int64).copy_(words & 0xFFFFFFFF)
    return generator.set_state(state)
