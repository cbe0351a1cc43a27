"""Parameters that are gathered when they are read, as operations of the model."""

from collections.abc import Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.parallel.settings import Precision
from torchtitan.parallel.sharding import map_parameter_reads, placement
from torchtitan.torch_private.dtensor import data_parallel_over

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    tensor_mesh: DeviceMesh,
    precision: Precision,
    without: Set[nn.Parameter] = frozenset(),
) -> None:
    """Shard the parameters of `model` over `mesh` (replicas, shards) or (shards), in place.

    Parameters that tensor parallelism split over `tensor_mesh` stay split over it; those in
    `without` are unchanged.
    """
    axes = [mesh[name] for name in mesh.mesh_dim_names or ()]
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in without:
                module.register_parameter(name, laid_out(parameter, mesh))
    read = partial(gather, axes=axes, tensor_mesh=tensor_mesh, precision=precision)
    map_parameter_reads(model, read, without)


def laid_out(parameter: nn.Parameter, mesh: DeviceMesh, dim: int = 0) -> nn.Parameter:
    """Return this rank's part of a parameter: as FSDP2 would split it, or on another dim."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    split = placement(parameter, parts=mesh.size(-1)) or Shard(dim)
    placements = [*[Replicate()] * (mesh.ndim - 1), split]
    data = parameter.detach()
    inner = data.to_local() if isinstance(data, DTensor) else data
    # No values are sent, since all are drawn later, by name.
    placed = distribute_tensor(inner, mesh, placements, src_data_rank=None)
    if isinstance(data, DTensor):
        placed = data_parallel_over(data, placed)
    return nn.Parameter(placed, requires_grad=parameter.requires_grad)


def gather(
    parameter: "DTensor", axes: Sequence[DeviceMesh], tensor_mesh: DeviceMesh, precision: Precision
) -> Tensor:
    """Gather a whole parameter to compute with; the split of tensor parallelism is kept.

    The parts are cast before they are sent. In the backward the gradients are cast, reduced and
    scattered over the parts, and then summed over the replicas.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    *copies, parts = axes
    split = Shard(cast(Shard, parameter.placements[len(copies)]).dim)
    is_split_again = parameter.device_mesh.ndim > len(axes)
    local = parameter.to_local()
    for mesh in copies:
        copy = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        copy = copy.redistribute(placements=[Replicate()], backward_dtype=precision.reduce)
        local = copy.to_local(grad_placements=[Partial()])
    whole = (
        DTensor.from_local(
            local,
            parts,
            [split],
            run_check=False,
            # A dim that is split twice is evenly divisible, so that its shape follows.
            shape=None if is_split_again else parameter.shape,
            stride=None if is_split_again else parameter.stride(),
        )
        .redistribute(
            placements=[Replicate()],
            forward_dtype=precision.compute,
            backward_dtype=precision.reduce,
        )
        .to_local(grad_placements=[Partial()])
    )
    if not is_split_again:
        return whole
    return DTensor.from_local(
        whole,
        tensor_mesh,
        parameter.placements[-1:],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
