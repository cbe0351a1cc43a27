"""Data parallelism as plain tensor operations that a compiler sees (SimpleFSDP; Zhang et al., 2024,
arXiv:2411.00284).

FSDP2 gathers parameters in hooks, outside of what is compiled. Here each parameter is a DTensor,
and its module has a property of the same name that gives the whole of it: to read `self.weight` is
to gather it, and its backward is to reduce the gradient and scatter it. So a compiled model is one
graph with every collective in it, for passes over that graph to free, merge and move (`bucketing`).

Parameters keep their names, and lie as FSDP2 lays them, so checkpoints of one load in the other.
Gradients are summed, never averaged, as in `fsdp2`.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import Field
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config import PlannedWorld, Problem
from torchtitan.parallel.settings import Precision, ReshardPolicy
from torchtitan.parallel.sharding import bucketing, casting
from torchtitan.parallel.sharding.bucketing import Bucketing
from torchtitan.parallel.sharding.fsdp2 import placement
from torchtitan.parallel.sharding.settings import Sharding, ShardingConfig, Target
from torchtitan.parallel.stages import Unit
from torchtitan.parallel.work import Part, Traffic
from torchtitan.torch_private.dtensor import data_parallel_over

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class SimpleFSDP(ShardingConfig):
    """Gathers and reductions as operations of the model, which then can be one graph."""

    in_graph: ClassVar[bool] = True

    name: Literal["simple_fsdp"] = Field("simple_fsdp", description="Which way to shard.")
    bucketing: Bucketing = Field(
        "none",
        description="Which collectives are merged into one: none; those of a block; as many as "
        "fit bucket_mb (size); or as torch's scheduler sees fit (auto, CUDA).",
    )
    bucket_mb: float = Field(
        100, gt=0, description="With bucketing = size: megabytes of a bucket, at most."
    )

    def problems(self, recipe: Any, world: PlannedWorld) -> Iterator[Problem]:
        if self.bucketing == "auto" and world.is_here and world.device_type != "cuda":
            message = (
                f"torch's scheduler estimates times on a CUDA device; there is none here, but "
                f'{world.device_type}; use "block" or "size"'
            )
            yield Problem("bucketing", message)

    def needs_graph(self) -> Mapping[str, str]:
        is_on = self.bucketing != "none"
        return {"bucketing": "collectives are merged in a compiled graph"} if is_on else {}

    def open(self, target: Target) -> "InGraph":
        return InGraph(self, target)

    def messages(self, part: Part) -> Iterator[Traffic]:
        """Each parameter is a unit, and nothing is put off to a later microbatch."""
        work, is_tied = part.work, part.work.spec.tied(part.work.args)
        for name, parameter in part.module.named_parameters():
            owner = name.rpartition(".")[0]
            is_table = isinstance(part.module.get_submodule(owner), nn.Embedding)
            reads = work.times * ((work.heads + is_tied) if is_table else 1)
            yield from part.of_unit(
                {name: part.shape(name, parameter.shape)},
                gathers=reads + part.recomputations(name),
                scatters=reads,
                sums=reads,
            )

    def reductions(self, passes: int, microbatches: int) -> int:
        return passes * microbatches


class InGraph(Sharding):
    """SimpleFSDP at work."""

    def __init__(self, config: SimpleFSDP, target: Target) -> None:
        self.config, self.target = config, target
        self.is_one_graph = target.compile.compiles("model")

    def compile_options(
        self, blocks: Mapping[str, nn.Module], units: Sequence[Unit]
    ) -> dict[str, Any] | None:
        """What is freed, merged and moved, as passes over the graphs."""
        if not self.is_one_graph:
            return None
        target, mesh = self.target, self.target.mesh
        freed: dict[ReshardPolicy, tuple[str, ...]] = {
            "always": ("",),
            "default": tuple(name for name in blocks if name != target.last_block),
            "never": (),
        }
        plan = bucketing.Plan(
            groups=tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim)),
            units=tuple(units),
            freed=freed[target.reshard],
            bucketing=self.config.bucketing,
            megabytes=self.config.bucket_mb,
            device_type=target.device_type,
        )
        return plan.options()

    def apply(self, part: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Every parameter is gathered where it is read."""
        apply(part, self.target.mesh, self.target.tensor_mesh, self.target.precision)

    def confirm(self) -> None:
        if self.is_one_graph:
            bucketing.confirm(self.config.bucketing)


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    tensor_mesh: DeviceMesh,
    precision: Precision,
    without: Set[nn.Parameter] = frozenset(),
) -> None:
    """Split and copy the parameters of `model` over `mesh` (copies, parts) or (parts), in place.

    Those that tensor parallelism split over `tensor_mesh` stay split over it; those in `without`
    are left alone.
    """
    axes = [mesh[name] for name in mesh.mesh_dim_names or ()]
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in without:
                module.register_parameter(name, laid_out(parameter, mesh))
    read = partial(gather, axes=axes, tensor_mesh=tensor_mesh, precision=precision)
    casting.read_by(model, read, without)


def laid_out(parameter: nn.Parameter, mesh: DeviceMesh, dim: int = 0) -> nn.Parameter:
    """This rank's part of a parameter: as FSDP2 would have it, or split on another dim."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    split = placement(parameter, parts=mesh.size(-1)) or Shard(dim)
    placements = [*[Replicate()] * (mesh.ndim - 1), split]
    data = parameter.detach()
    inner = data.to_local() if isinstance(data, DTensor) else data
    # No rank's values are sent: all are drawn later, by name.
    placed = distribute_tensor(inner, mesh, placements, src_data_rank=None)
    if isinstance(data, DTensor):
        placed = data_parallel_over(data, placed)
    return nn.Parameter(placed, requires_grad=parameter.requires_grad)


def gather(
    parameter: "DTensor", axes: Sequence[DeviceMesh], tensor_mesh: DeviceMesh, precision: Precision
) -> Tensor:
    """A whole parameter to compute with; what tensor parallelism split stays split.

    The parts are cast before they are sent. In the backward the gradients are cast and added up:
    over the parts, of which each rank keeps its own of the sum, and then over the copies of that.
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
            *(local, parts, [split]),
            run_check=False,
            # What is split twice comes out even, so that its shape follows.
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
        *(whole, tensor_mesh, parameter.placements[-1:]),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
