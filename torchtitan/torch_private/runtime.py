"""State of autograd, of random generators, and of memory on CUDA."""

from hashlib import shake_256
from pathlib import Path

import torch


def is_in_backward() -> bool:
    """Whether a backward is running, which may recompute a forward; a compiler traces only the
    forward outside of it.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


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


def record_memory(events: int | None) -> None:
    """Record the last `events` allocations and frees on CUDA; None stops recording."""
    if events is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=events)


def dump_memory(path: Path) -> None:
    """Write the record, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
