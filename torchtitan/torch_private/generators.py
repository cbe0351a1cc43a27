"""Random generators on the CPU with more state than a torch seed provides."""

from hashlib import shake_256

import torch

WORDS = 624
"""Number of 32-bit words in the state of a Mersenne Twister."""
FIRST = 24
"""Offset of the words in a generator's state, 8 bytes each."""


def generator_of(name: str) -> torch.Generator:
    """Return a generator whose whole state is a hash of a name.

    `manual_seed` keeps 32 bits of a seed, so two of 100,000 names are likely to draw alike.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    state = generator.get_state()
    assert len(state) == 5056, "torch keeps the state of a generator in another form"
    digest = shake_256(name.encode()).digest(4 * WORDS)
    words = torch.frombuffer(bytearray(digest), dtype=torch.int32).to(torch.int64)
    state[FIRST : FIRST + 8 * WORDS].view(torch.int64).copy_(words & 0xFFFFFFFF)
    return generator.set_state(state)
