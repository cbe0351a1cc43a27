"""The one place that touches torch's private interfaces (supported: torch 2.11 to 2.13).

They are imported where they are used: DTensor alone takes a second, which a command that only
reads a recipe should not pay.
"""

import math
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def local_extent(tensor: "DTensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's part of `tensor`, and where in the whole that part begins.

    Torch gives the first index only, so the part must be contiguous. Under FSDP over tensor
    parallelism (`_StridedShard`) it is, as long as the split is even.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    sizes, placements = tensor.device_mesh.shape, tensor.placements
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            dim, inner = placement.dim, zip(sizes[axis + 1 :], placements[axis + 1 :], strict=True)
            split = math.prod(size for size, p in inner if p.is_shard(dim))
            parts = sizes[axis] * split
            assert placement.split_factor == split, f"scattered part: {placements}"
            assert tensor.shape[dim] % parts == 0, f"{tensor.shape} not evenly in {parts} parts"
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)


def join(mesh: "DeviceMesh", axes: tuple[str, ...], name: str) -> "DeviceMesh":
    """One axis called `name` over the ranks of several neighbouring axes of `mesh`."""
    return mesh[axes]._flatten(name)


def set_timeout(group: ProcessGroup | None, timeout: timedelta) -> None:
    """Change how long a collective of `group` (None: the default group) may take."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)


def record_memory(events: int | None) -> None:
    """Remember the last `events` allocations and frees on CUDA; None: stop remembering."""
    if events is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=events)


def dump_memory(path: Path) -> None:
    """Write what is remembered, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
