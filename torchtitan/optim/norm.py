"""The global norm of gradients with any placement."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.torch_private.dtensor import is_dtensor, stored

Layout = Any
"""Mesh and placements of a DTensor; None for a plain tensor."""


def global_norm(gradients: Iterable[Tensor], stages: dist.ProcessGroup | None = None) -> Tensor:
    """Return the 2-norm, in float32, of all gradients on all ranks; see `combined`."""
    by_layout: dict[Layout, list[Tensor]] = {}
    for gradient in gradients:
        by_layout.setdefault(layout_of(gradient), []).append(local(gradient))
    norms = {layout: local_norms(group) for layout, group in by_layout.items()}
    return combined(norms, stages)


def combined(
    norms: Mapping[Layout, Sequence[Tensor]], stages: dist.ProcessGroup | None = None
) -> Tensor:
    """Combine this rank's gradient norms into the 2-norm over all ranks.

    Gradients are grouped by mesh and placements: the square of each group is summed over the mesh
    axes that shard it, not over those that replicate it; then all are summed over `stages`, whose
    ranks have gradients of other parameters.
    """
    squares = []
    for layout, group in norms.items():
        square = torch.stack(list(group)).square().sum()
        for axis, placement in enumerate(layout[1] if layout else ()):
            if not placement.is_replicate():
                dist.all_reduce(square, group=layout[0].get_group(axis))
        squares.append(square)
    total = torch.stack(squares).sum()
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def local_norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor, in at least float32."""
    dtypes = {torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors}
    return torch._foreach_norm(tensors, 2, max(dtypes, key=lambda dtype: dtype.itemsize))


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of a tensor."""
    return (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor."""
    return stored(tensor.to_local() if is_dtensor(tensor) else tensor)
