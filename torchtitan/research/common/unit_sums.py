"""Sums over the units of each parameter and over all parameters, the same on every layout.

A unit produces one output: a row of a matrix, a filter of a convolution, or a whole vector. Ranks
hold parts of units, of tensors and of the model, and separate sums would take hundreds of small
reductions. Here all sums over the ranks that share tensors go through one buffer, in float64, so
that a sum hardly depends on how it was split.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.optim.parameters import NamedParameter, local
from torchtitan.torch_private.dtensor import is_dtensor, local_extent, ranks_of


@dataclass(frozen=True)
class Units:
    """Placement of the units of one parameter on the ranks."""

    parameter: NamedParameter
    copies: int
    """Number of the summing ranks that hold each element."""
    rows: slice
    """Range of the units of which this rank has all or parts."""
    are_whole: bool
    """Whether no unit is split over ranks."""

    @property
    def count(self) -> int:
        """Number of units of all ranks together."""
        shape = self.parameter.shape
        return shape[0] if len(shape) > 1 else 1

    @property
    def size(self) -> int:
        """Number of elements of a unit."""
        return self.parameter.shape.numel() // self.count

    def sums(self, values: Tensor) -> Tensor:
        """Sum over this rank's part of each unit: (units,), of values in the layout of its part."""
        return values.sum(self._dims, dtype=torch.float64).view(-1)

    def squares(self, values: Tensor) -> Tensor:
        """Sum the squares over this rank's part of each unit: (units,)."""
        norms: Tensor = torch.linalg.vector_norm(values, dim=self._dims, dtype=torch.float64)
        return norms.view(-1).square()

    @property
    def _dims(self) -> tuple[int, ...]:
        ndim = len(self.parameter.shape)
        return tuple(range(1, ndim)) if ndim > 1 else tuple(range(ndim))

    def spread(self, each: Tensor) -> Tensor:
        """Reshape a number for each unit (units,) to broadcast over this rank's part."""
        return each.view(-1, *[1] * (len(self.parameter.shape) - 1))


def units_of(parameter: NamedParameter, group: dist.ProcessGroup | None) -> Units:
    """Return the placement of the units of a parameter on the ranks of `group`."""
    axes, mesh = split_axes(parameter), parameter.mesh
    parts = math.prod(mesh.size(axis) for axis in axes) if mesh else 1
    copies = (group.size() if group else 1) // parts
    if parameter.tensor.ndim < 2:
        return Units(parameter, copies, slice(0, 1), are_whole=not axes)
    are_whole = all(parameter.placements[axis].is_shard(0) for axis in axes)
    begin = 0
    if not are_whole and is_dtensor(parameter.tensor):
        begin = local_extent(parameter.tensor)[1][0]
    rows = slice(begin, begin + len(local(parameter.tensor)))
    return Units(parameter, copies, rows, are_whole)


def split_axes(parameter: NamedParameter) -> list[int]:
    """Return the axes of a parameter's mesh over which it is split."""
    mesh = parameter.mesh
    return [
        axis
        for axis, placement in enumerate(parameter.placements)
        if mesh is not None and not placement.is_replicate() and mesh.size(axis) > 1
    ]


def sharing(parameters: Sequence[NamedParameter]) -> dist.ProcessGroup | None:
    """Return the ranks that hold parts of the same parameters as this one; None: it has all.

    All ranks must call it, since a group is created if several axes of a mesh split parameters.
    """
    # Every axis that splits some parameter splits the one that is split the most.
    most = max(parameters, key=lambda p: len(split_axes(p)), default=None)
    axes = split_axes(most) if most else []
    if most is None or most.mesh is None or not axes:
        return None
    if len(axes) == 1:
        group: dist.ProcessGroup = most.mesh.get_group(axes[0])
        return group
    here = most.mesh.get_coordinate()
    assert here is not None
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(here))
    ranks = ranks_of(most.mesh)[index].flatten().tolist()
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made


def sum_over(group: dist.ProcessGroup | None, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Sum each tensor over the ranks of `group`, all of them in one collective."""
    if group is None or group.size() == 1 or not parts:
        return parts
    buffer = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(buffer, group=group)
    sums = torch.split(buffer, [part.numel() for part in parts])
    return [each.view(part.shape) for each, part in zip(sums, parts, strict=True)]
