"""Torch's record of memory on CUDA."""

from pathlib import Path

import torch


def record_memory(events: int | None) -> None:
    """Record the last `events` allocations and frees on CUDA; None stops recording."""
    if events is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=events)


def dump_memory(path: Path) -> None:
    """Write the record, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
