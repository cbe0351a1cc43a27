"""The global norm of gradients, however they are laid out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.torch_private.dtensor import is_dtensor, stored

Layout = Any
"""Mesh and placements of a DTensor; None of a plain tensor."""


def global_norm(gradients: Iterable[Tensor], stages: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm, in float32, over all gradients of all ranks; see `combined`."""
    by_layout: dict[Layout, list[Tensor]] = {}
    for gradient in gradients:
        by_layout.setdefault(layout_of(gradient), []).append(local(gradient))
    norms = {layout: local_norms(group) for layout, group in by_layout.items()}
    return combined(norms, stages)


def combined(
    norms: Mapping[Layout, Sequence[Tensor]], stages: dist.ProcessGroup | None = None
) -> Tensor:
    """The 2-norm over all ranks, from the norm of what this rank holds of each gradient.

    Gradients are grouped by how they lie on a mesh: each group's square is summed over the mesh
    axes that split it, and over no axis that holds copies of it; then all are added up over
    `stages`, whose ranks have gradients of other parameters.
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
    """The 2-norm of each, in float32 at least."""
    dtypes = {torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors}
    return torch._foreach_norm(tensors, 2, max(dtypes, key=lambda dtype: dtype.itemsize))


def layout_of(tensor: Tensor) -> Layout:
    """How a tensor lies on a mesh."""
    return (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return stored(tensor.to_local() if is_dtensor(tensor) else tensor)
