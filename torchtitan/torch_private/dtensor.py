"""Placements of DTensors on a mesh, and modules that FSDP2 shards."""

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor.

    Importing DTensor takes half a second, so if it is not imported yet, there is none.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Allocate the memory of a meta-device model, uninitialized: a faster `model.to_empty`.

    `empty_like` of a meta tensor imports sympy, which takes as long as a step.
    """

    def empty(tensor: Tensor) -> Tensor:
        if is_dtensor(tensor):
            return torch.empty_like(tensor, device=device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    model._apply(empty)  # type: ignore[no-untyped-call]


def ranks_of(mesh: DeviceMesh) -> "NDArray[np.int64]":
    """Return the rank at each coordinate of a mesh, also where tensors have no values."""
    with _disable_current_modes():
        return mesh.mesh.numpy()


def local_extent(tensor: "DTensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of `tensor`, and its offset in the whole.

    Under FSDP over tensor parallelism (`_StridedShard`), a part of a part is contiguous, if uneven
    too; torch returns an offset of the even ones only.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    sizes, placements = tensor.device_mesh.shape, tensor.placements
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            dim, inner = placement.dim, zip(sizes[axis + 1 :], placements[axis + 1 :], strict=True)
            split = math.prod(size for size, p in inner if p.is_shard(dim))
            assert placement.split_factor == split, f"scattered part: {placements}"
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a tensor has a part on each rank of its mesh"
    found = extents(tensor, coordinate)
    return tuple(map(len, found)), tuple(each.start for each in found)


def extents(tensor: Tensor, coordinate: Sequence[int]) -> list[range]:
    """Return the range of each dim of `tensor` at a coordinate of its mesh.

    A part of a part is contiguous too, so its size does not depend on the order of the axes, but
    its start does: FSDP's split after tensor parallelism (`_StridedShard`) comes last.
    """
    found = [range(size) for size in tensor.shape]
    if not is_dtensor(tensor):
        return found
    for axis, dim in order_of_cuts(tensor):
        whole, parts = found[dim], tensor.device_mesh.size(axis)
        size = -(-len(whole) // parts)
        begin = min(coordinate[axis] * size, len(whole))
        found[dim] = whole[begin : begin + size]
    return found


def order_of_cuts(tensor: "DTensor") -> list[tuple[int, int]]:
    """Return the axes of the mesh that cut `tensor`, and the dim of each, outer parts first."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    axes = [*enumerate(tensor.placements)]
    later = [item for item in axes if isinstance(item[1], _StridedShard)]
    ordered = [*(item for item in axes if item not in later), *reversed(later)]
    return [(axis, p.dim) for axis, p in ordered if isinstance(p, Shard | _StridedShard)]


def stored(tensor: Tensor) -> Tensor:
    """Return the plain tensor inside one that FSDP2 gathers in another format, such as Float8."""
    whole: Tensor = getattr(tensor, "_tensor", tensor)
    return whole


def detached_part(tensor: Tensor) -> Tensor:
    """Return this rank's part, outside of autograd, in less time than `to_local` takes."""
    return stored(tensor._local_tensor if is_dtensor(tensor) else tensor).detach()


def data_parallel_over(whole: "DTensor", part: "DTensor") -> "DTensor":
    """Return a tensor sharded over two meshes, as FSDP2 represents it.

    Args:
        whole: the tensor on the mesh of tensor parallelism.
        part: this rank's part of it on the mesh of data parallelism.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    *copies, split = part.placements
    assert isinstance(split, Shard)
    sizes = zip(whole.device_mesh.shape, whole.placements, strict=True)
    inner = math.prod(size for size, placement in sizes if placement.is_shard(split.dim))
    # This rank's part is a shard of its part on the other mesh, which varies faster.
    strided = _StridedShard(split.dim, split_factor=inner) if inner > 1 else split
    return DTensor.from_local(
        part.to_local(),
        DeviceMesh._concatenate([part.device_mesh, whole.device_mesh]),
        (*copies, strided, *whole.placements),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def laid_out_as(tensor: Tensor, part: Tensor) -> Tensor:
    """Return `part` as this rank's part of a tensor with the layout of `tensor`, on part's device.

    The public `DTensor.from_local` would move it to the device of the mesh.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return part
    return DTensor(part, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def placed(
    part: Tensor, mesh: DeviceMesh, placements: "Sequence[Placement]", shape: Size
) -> Tensor:
    """Return `part` as this rank's part of a tensor of `shape` with `placements` on a mesh."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), part.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def split_dim(placement: "Placement") -> int | None:
    """Return the dim of a sharding placement; torch's `is_shard` is False for `_StridedShard`."""
    return getattr(placement, "dim", None)


def splits_within(placement: "Placement") -> int:
    """Return the number of shards of later mesh axes that a placement splits; 1: the whole."""
    return getattr(placement, "split_factor", 1)


def shard_rows(within: int) -> "Placement":
    """Return a placement that shards rows within each of `within` shards of later mesh axes."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(0, split_factor=within) if within > 1 else Shard(0)


if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def gather_with(unit: "FSDPModule", first: nn.Module, last: nn.Module) -> None:
    """Gather the parameters of a unit before the forward of `first`, until after that of `last`.

    FSDP2's hooks then run there instead: a compiled forward does not contain them, and parameters
    may be read outside of their module. Call it before `last` is sharded.
    """
    state: Any = unit._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    first.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
    last.register_forward_hook(state._post_forward)
