"""Data parallelism as plain tensor operations that a compiler sees (SimpleFSDP; Zhang et al., 2024,
arXiv:2411.00284).

FSDP2 gathers parameters in hooks, outside of what is compiled. Here each parameter is a DTensor,
and its module has a property of the same name that gives the whole of it: to read `self.weight` is
to gather it, and its backward is to reduce the gradient and scatter it. So a compiled model is one
graph with every collective in it, for passes over that graph to free, merge and move (`bucketing`).

Parameters keep their names, and lie as FSDP2 lays them, so checkpoints of one load in the other.
Gradients are summed, never averaged, as in `fsdp`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.parallel import bucketing, fsdp
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.fsdp import Precision
from torchtitan.parallel.settings import ParallelismConfig
from torchtitan.torch_private.dtensor import data_parallel_over

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


IMPL = "parallelism.data_parallel_impl"
RESHARD = "parallelism.fsdp_reshard_after_forward"


def problems(
    config: ParallelismConfig,
    compile: CompileConfig,
    *,
    hooks: bool,
    cpu_offload: bool,
) -> Iterator[tuple[str, str]]:
    """What cannot work together, as (key, message).

    Args:
        hooks: whether FSDP2 would have anything to gather, to reduce or to cast.
    """
    compiles, in_one = compile.compiles("model"), compile.granularity == "model"
    merges = config.simple_fsdp_bucketing != "none"
    if config.data_parallel_impl == "fsdp2":
        if compiles and in_one and hooks:
            message = (
                "FSDP2 gathers and casts in hooks around the blocks, which no graph can hold; use "
                f'{IMPL} = "simple_fsdp", or "block"'
            )
            yield "compile.granularity", message
        if merges:
            yield bucketing.KEY, f'it means nothing without {IMPL} = "simple_fsdp"'
        return
    if cpu_offload:
        message = f'{IMPL} = "simple_fsdp" gathers where parameters are; use "fsdp2" there'
        yield "training.enable_cpu_offload", message
    if config.enable_async_tensor_parallel:
        message = f'{IMPL} = "simple_fsdp" changes the same graphs; use "fsdp2" there'
        yield "parallelism.enable_async_tensor_parallel", message
    if not compiles:
        needs = (
            'so it needs compile.enable = true with "model" in compile.components and '
            'compile.granularity = "model"'
        )
        if config.fsdp_reshard_after_forward == "always":
            yield RESHARD, f'with {IMPL} = "simple_fsdp" the compiler frees them, {needs}'
        if merges:
            yield bucketing.KEY, f"collectives are merged in a compiled graph, {needs}"
        return
    if not in_one:
        message = (
            f'with {IMPL} = "simple_fsdp" blocks that share a graph could not be freed or merged '
            'each by itself, nor what is in none; use "model"'
        )
        yield "compile.granularity", message
    if compile.backend != "inductor":
        message = f'with {IMPL} = "simple_fsdp" it is inductor that frees and merges; use it'
        yield "compile.backend", message


def problems_of_machine(config: ParallelismConfig, device_type: str) -> Iterator[tuple[str, str]]:
    """What this very machine cannot do."""
    if config.simple_fsdp_bucketing == "auto" and device_type != "cuda":
        message = (
            f"torch's scheduler estimates times on a CUDA device; there is none here, but "
            f'{device_type}; use "block" or "size"'
        )
        yield bucketing.KEY, message


def remarks(config: ParallelismConfig, compile: CompileConfig) -> Iterator[str]:
    """What works, but perhaps not as its writer thinks."""
    keeps = config.fsdp_reshard_after_forward == "default" and not compile.compiles("model")
    if config.data_parallel_impl == "simple_fsdp" and keeps:
        yield (
            f'{IMPL}: without compile.enable, "simple_fsdp" keeps what it gathers in the forward '
            "until the backward: the whole model, but for blocks that are recomputed; and gathers "
            "each parameter by itself"
        )


def apply(
    model: nn.Module, mesh: DeviceMesh, tensor_mesh: DeviceMesh, precision: Precision
) -> None:
    """Split and copy the parameters of `model` over `mesh` (copies, parts) or (parts), in place.

    Those that tensor parallelism split over `tensor_mesh` stay split over it.
    """
    axes = [mesh[name] for name in mesh.mesh_dim_names or ()]
    # One class for all modules alike, or the compiler would take each for another.
    kinds: dict[Any, type[nn.Module]] = {}
    for module in model.modules():
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters:
            continue
        for name, parameter in parameters.items():
            module.register_parameter(name, _laid_out(parameter, mesh))
        kind = type(module)
        if (kind, *parameters) not in kinds:
            read = partial(gather, axes=axes, tensor_mesh=tensor_mesh, precision=precision)
            kinds[kind, *parameters] = _gathering(kind, parameters, read)
        module.__class__ = kinds[kind, *parameters]


def _laid_out(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's part of a parameter, as FSDP2 would have it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    split = fsdp.placement(parameter, parts=mesh.size(-1)) or Shard(0)
    placements = [*[Replicate()] * (mesh.ndim - 1), split]
    data = parameter.detach()
    inner = data.to_local() if isinstance(data, DTensor) else data
    # No rank's values are sent: all are drawn later, by name.
    placed = distribute_tensor(inner, mesh, placements, src_data_rank=None)
    if isinstance(data, DTensor):
        placed = data_parallel_over(data, placed)
    return nn.Parameter(placed, requires_grad=parameter.requires_grad)


def _gathering(
    kind: type[nn.Module], names: Iterable[str], read: Callable[[Any], Tensor]
) -> type[nn.Module]:
    """A subclass of `kind` whose parameters of these names are read by `read`."""

    def reader(name: str) -> property:
        # By way of `_parameters`, where whoever lists or loads them still finds the parts.
        return property(lambda module: read(module._parameters[name]))

    return type(kind.__name__, (kind,), {name: reader(name) for name in names})


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
