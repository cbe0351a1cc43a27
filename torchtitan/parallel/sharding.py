"""Shardings, which split the parameters of a model among ranks; FSDP 2 is that of the core."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.comm import CommunicationConfig, Communicator, Gather, PlainGather, Reduce, Unit
from torchtitan.config import Config, Context, Problem, Registry
from torchtitan.models.experts import Experts
from torchtitan.models.spec import TensorRole
from torchtitan.optim.parameters import local
from torchtitan.parallel import stages
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.settings import Precision, ReshardPolicy
from torchtitan.torch_private.dtensor import gather_with


@dataclass(frozen=True)
class ShardingTarget:
    """Target of a sharding: the meshes, settings and facts about the model that it uses."""

    mesh: DeviceMesh
    """Mesh of the ranks that share the parameters: (replicas, shards), or (shards) without replicas
    or if these synchronize outside the sharding."""
    tensor_mesh: DeviceMesh
    precision: Precision
    reshard: ReshardPolicy
    """Whether a block is freed after its forward: `always`; `never`; `default`: all but the last
    of the model, which the backward needs immediately."""
    last_block: str
    """Name of the model's last block."""
    ends: tuple[stages.Unit, stages.Unit]
    """Modules before and after all blocks (`ModelSpec.ends`)."""
    compile: CompileConfig
    communication: CommunicationConfig
    cpu_offload: bool
    device_type: str
    expert_mesh: DeviceMesh | None = None
    """Mesh like `mesh` of the ranks with the same experts, if other ranks have others."""
    tensor_plan: Mapping[str, TensorRole] = field(default_factory=dict)
    """Tensor-parallel roles of modules, by their names in the model."""
    heads: int = 1
    """Number that the ranks must divide to have whole heads, of queries and of keys; 1: never."""
    vocabulary_chunk: int = 0
    """Loss chunk size in vocabulary entries; 0 computes the loss from logits."""

    @property
    def overlaps(self) -> bool:
        """Whether communication overlaps with computation."""
        return self.device_type == "cuda"


class Sharding:
    """Sharding of the parts of a model that this rank has."""

    def compile_options(
        self, blocks: Mapping[str, nn.Module], units: Sequence[stages.Unit]
    ) -> dict[str, Any] | None:
        """Return the `torch.compile` options for a part of the model; called before `apply`.

        Args:
            blocks: blocks of the part, by name.
            units: names of the modules that are gathered together.
        """
        return None

    def apply(self, part: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Shard and replicate the parameters of a part of the model over the mesh, in place."""
        raise NotImplementedError

    def before_backward(self, is_last: bool) -> None:
        """Prepare the backward of a microbatch, not in a pipeline; `is_last`: the step's last."""

    def complete_gradients(self) -> None:
        """Complete the gradients of a step on this rank, after its last backward."""

    def end_step(self) -> None:
        """Finish a step, after the last pass with its weights."""

    def after_evaluate(self) -> None:
        """Act after the forwards of an evaluation, which no backward follows."""

    def state(self) -> dict[str, Tensor]:
        """Return per-rank state to checkpoint, by name (`Communicator.state`)."""
        return {}

    def confirm(self) -> None:
        """Log the effect of the sharding, after the first step.

        Raises:
            RuntimeError: if it had none.
        """


class ShardingConfig(Config):
    """Settings of a sharding; `name` selects the subclass."""

    in_graph: ClassVar[bool] = False
    """Whether gathers and reductions are part of the computation, visible to a compiler."""
    packs_weights: ClassVar[bool] = False
    """Whether a parameter may choose the form in which it is gathered, as in Float8."""
    never_whole: ClassVar[bool] = False
    """Whether no rank ever has a whole matrix, which cutting, conversion and compilation need."""
    places_experts: ClassVar[bool] = False
    """Whether ranks can have different experts."""
    follows: ClassVar[frozenset[str]] = frozenset()
    """Choices of `[communication]` that the sharding follows: weights, gradients."""

    name: str
    """Method of sharding: a key of torchtitan.parallel.sharding.SHARDING."""

    def verified_as(self) -> Mapping[str, tuple[Any, str]]:
        """Return the settings to change when a layout is compared with one rank, without
        compilation: by key, the value and the reason."""
        return {}

    @abstractmethod
    def open(self, target: ShardingTarget) -> Sharding:
        """Return the sharding for `target`."""

    @property
    def neighbors(self) -> int:
        """Number of ranks over which freed parameters stay split until regathered; 0: all."""
        return 0

    @property
    def accumulates_whole(self) -> bool:
        """Whether each rank accumulates whole gradients over microbatches."""
        return False


if TYPE_CHECKING:  # torch's take 1.3 s to import, which a recipe check should not pay
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Shard

    Placing = Callable[[nn.Parameter], Shard | None]


class FSDP2(ShardingConfig):
    """Settings of FSDP2, which gathers and reduces in hooks around the blocks."""

    packs_weights: ClassVar[bool] = True
    places_experts: ClassVar[bool] = True
    follows: ClassVar[frozenset[str]] = frozenset({"weights", "gradients"})

    name: Literal["fsdp2"] = "fsdp2"
    """Method of sharding."""
    regather_size: int = Field(0, ge=0)
    """Number of neighboring ranks over which parameters stay sharded after the forward, and from
    which the backward gathers them; 0: all ranks."""
    accumulate_whole: bool = False
    """Accumulate unsharded gradients on each rank, and reduce them once after the last microbatch.
    This sends less, but each rank keeps all gradients in memory."""
    forward_prefetch: int = Field(0, ge=0)
    """On CUDA: number of blocks that the forward gathers ahead; 0: each when it is reached."""
    backward_prefetch: int = Field(1, ge=1)
    """On CUDA: number of blocks that the backward gathers ahead."""
    reduce_scatters_in_flight: int = Field(1, ge=1)
    """On CUDA: number of units whose gradients may be in reduction before the backward waits."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if context.world.is_here and context.world.device_type == "cpu":
            for key, default in ON_CUDA.items():
                if getattr(self, key) != default:
                    message = (
                        "on a CPU communication does not overlap, so this has no effect; leave "
                        "it out"
                    )
                    yield Problem(key, message, (), "note")

    def open(self, target: ShardingTarget) -> "FullyShard":
        return FullyShard(self, target)

    @property
    def neighbors(self) -> int:
        return self.regather_size

    @property
    def accumulates_whole(self) -> bool:
        return self.accumulate_whole


ON_CUDA = {
    key: FSDP2.model_fields[key].default
    for key in ("forward_prefetch", "backward_prefetch", "reduce_scatters_in_flight")
}
"""Settings of overlap on CUDA, with their defaults."""


class FullyShard(Sharding):
    """FSDP2, applied to this rank's parts of a model."""

    def __init__(self, config: FSDP2, target: ShardingTarget) -> None:
        self.config, self.target = config, target
        self.modules: list[FSDPModule] = []
        self.units: list[Unit] = []
        """Parameters that belong to each of `modules` alone."""
        self.ways: dict[str, Communicator] = {}
        """Communication by purpose and module number, such as `weights.0`."""
        self.taken: set[str] = set()
        """Names of the parameters that are already sharded."""

    def apply(self, part: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Shard `part`; each block is gathered on its own, just before it is used.

        So are the modules before the blocks, and those after them together, with the loss that may
        read their weights: gathered with the root they would be held all the time.
        """
        # Under tensor parallelism the logits are a view of a DTensor, which is never modified.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        frees, ends = self.target.reshard, self.target.ends
        for number, (name, block) in enumerate(blocks.items(), 1):
            is_last = number == len(blocks)
            reshards = frees == "always" or (frees == "default" and not is_last)
            if self.target.expert_mesh is not None:
                for inner, module in block.named_modules(prefix=name):
                    if isinstance(module, Experts):
                        gather_with(self._shard({inner: module}, reshards), block, block)
            self._shard({name: block}, reshards)
        modules = dict(part.named_modules())  # of a stage, which may lack some
        first, last = ({n: modules[n] for n in names if n in modules} for names in ends)
        for name, module in first.items():
            unit = self._shard({name: module}, frees != "never")
            # The gradient of a table needs no weights.
            unit.set_unshard_in_backward(not isinstance(module, nn.Embedding))
            # Or else its backward would gather what ended the forward of the batch before.
            unit.set_modules_to_backward_prefetch([unit])
        turns = [*first.values(), *blocks.values()]
        if last:
            turns.append(next(iter(last.values())))
            gather_with(self._shard(last, frees == "always"), turns[-1], part)
        self._shard({"": part}, frees == "always")
        keep_integers_on_host(part)
        if self.target.overlaps:
            self._overlap(turns)

    def _overlap(self, turns: Iterable[nn.Module]) -> None:
        """Set how far ahead units are gathered, and how many reductions may be pending.

        Args:
            turns: modules before which units are gathered, in the order of the forward.
        """
        config, apart = self.config, self.target.expert_mesh is not None
        # With experts on other ranks, the host waits in each block, so it must be ahead before.
        ahead, before = max(config.forward_prefetch, int(apart)), config.backward_prefetch
        units = [self._units(module) for module in turns]
        for number, own in enumerate(units):
            # The defaults are torch's own.
            if later := units[number + 1 : number + 1 + ahead]:
                own[-1].set_modules_to_forward_prefetch([*chain(*later)])
            earlier = units[max(number - before, 0) : number]
            if earlier and (before > 1 or apart):
                own[-1].set_modules_to_backward_prefetch([*chain(*reversed(earlier))])
        if config.reduce_scatters_in_flight > 1:
            root = self.modules[-1]
            root.set_reduce_scatter_max_input_buffers(config.reduce_scatters_in_flight)

    def _units(self, block: nn.Module) -> "list[FSDPModule]":
        """Return the units of a block that are gathered together, itself last."""
        inside = {id(module) for module in block.modules()}
        return [module for module in self.modules if id(module) in inside]

    def _shard(self, modules: Mapping[str, nn.Module], reshard_after_forward: bool) -> "FSDPModule":
        """Shard the parameters of `modules`, by name, as a unit; return the first module."""
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        target, precision, first = self.target, self.target.precision, next(iter(modules.values()))
        pin_memory = target.device_type == "cuda"
        mesh = target.mesh
        place: Placing = partial(placement, parts=mesh.size(-1))
        if target.expert_mesh is not None and isinstance(first, Experts):
            mesh = target.expert_mesh
            place = partial(expert_placement, first, parts=mesh.size(-1))
        unit = self._unit(modules, place, mesh.size(-1))
        fully_shard(
            [*modules.values()],
            mesh=mesh,
            reshard_after_forward=reshard_after_forward and (self.config.regather_size or True),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=precision.compute, reduce_dtype=precision.reduce
            ),
            offload_policy=(
                CPUOffloadPolicy(pin_memory=pin_memory) if target.cpu_offload else OffloadPolicy()
            ),
            shard_placement_fn=place,
        )
        sharded = cast("FSDPModule", first)
        if unit.shapes:
            group = mesh.get_group(mesh.ndim - 1)
            gather = target.communication.weights.open(unit, group)
            reduce = target.communication.gradients.open(unit, group)
            # These have torch's interface, but not its base classes, which are private.
            as_gather: Any = _Gather(gather, group)
            as_reduce: Any = _ReduceScatter(reduce)
            sharded.set_custom_all_gather(as_gather)
            sharded.set_custom_reduce_scatter(as_reduce)
            number = len(self.modules)
            self.ways |= {f"weights.{number}": gather, f"gradients.{number}": reduce}
        sharded.set_gradient_divide_factor(1.0)
        # gloo has no pre-multiplied sum; with a factor of 1 the plain sum is the same.
        sharded.set_force_sum_reduction_for_comms(True)
        self.modules.append(sharded)
        self.units.append(unit)
        return sharded

    def _unit(self, modules: Mapping[str, nn.Module], place: "Placing", parts: int) -> Unit:
        """Return the parameters of modules, except those that are already sharded."""
        shapes = {}
        for key, parameter in chain(*(m.named_parameters(name) for name, m in modules.items())):
            if key not in self.taken:
                sizes, split = list(local(parameter).shape), place(parameter)
                dim = split.dim if split else 0
                sizes[dim] = -(-sizes[dim] // parts)
                shapes[key] = torch.Size(sizes)
        self.taken |= shapes.keys()
        return Unit(next(iter(modules)), shapes, torch.device(self.target.device_type))

    def state(self) -> dict[str, Tensor]:
        return {
            f"{what}.{name}": tensor
            for what, way in self.ways.items()
            for name, tensor in way.state().items()
        }

    def end_step(self) -> None:
        for way in self.ways.values():
            way.end_step()

    def before_backward(self, is_last: bool) -> None:
        """Reduce sharded gradients in every microbatch, since whole ones would cost the memory that
        sharding saved, unless the recipe asks for it; sum replicas once, in the last.
        """
        for module in self.modules:
            if self.config.accumulate_whole:
                module.set_requires_gradient_sync(is_last)
            module.set_requires_all_reduce(is_last)
            module.set_is_last_backward(is_last)

    def after_evaluate(self) -> None:
        """Free gathered parameters, which the next forward would use even after an update."""
        for module in self.modules:
            module.reshard()


def keep_integers_on_host(part: nn.Module) -> None:
    """Hide integers on the host from FSDP2, which would move all inputs to its device."""
    hidden: dict[str, Any] = {}

    def hide(module: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.is_cpu}
        names = [name for name, x in tensors.items() if not x.is_floating_point()]
        hidden.update({name: inputs.pop(name) for name in names})
        return args, inputs

    def show(module: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        inputs |= hidden
        hidden.clear()
        return args, inputs

    part.register_forward_pre_hook(hide, prepend=True, with_kwargs=True)
    part.register_forward_pre_hook(show, with_kwargs=True)


class _Sending:
    """Allocation of FSDP2's communication buffers."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass(frozen=True)
class _Gather(_Sending):
    """Adapter of a `Gather` to FSDP2's interface."""

    gather: Gather
    group: ProcessGroup

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool
    ) -> None:
        # A different group is that of `regather_size`, over which freed parameters stay split.
        gather = self.gather if group == self.group else PlainGather(group)
        gather(output_tensor, input_tensor)


@dataclass(frozen=True)
class _ReduceScatter(_Sending):
    """Adapter of a `Reduce` to FSDP2's interface."""

    reduce: Reduce

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        self.reduce(output_tensor, input_tensor)


def placement(parameter: nn.Parameter, parts: int) -> "Shard | None":
    """Return the dim along which to split a parameter into `parts`; None: the first, the default.

    Rows already split by tensor parallelism are split again only if evenly divisible; otherwise
    columns are split, so that each rank's part stays one contiguous piece. Vectors have none.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(parameter, DTensor) or parameter.placements[0] != Shard(0):
        return None
    if parameter.ndim == 1:
        return None
    return Shard(1) if len(parameter) % (parameter.device_mesh.size() * parts) else None


def expert_placement(experts: Experts, parameter: nn.Parameter, parts: int) -> "Shard":
    """Return the dim along which to split a parameter of some of the experts into `parts`.

    Experts stay whole if the parts divide them; otherwise each is split along the model's dim.
    """
    from torch.distributed.tensor import Shard

    own = len(local(parameter))
    name = next(name for name, p in experts.named_parameters() if p is parameter)
    return Shard(experts.MODEL_DIM.get(name, 0) if own % parts else 0)


def map_parameter_reads(
    model: nn.Module, read: Callable[[Any], Tensor], without: Set[nn.Parameter] = frozenset()
) -> None:
    """Make reads of all parameters of `model`, except those in `without`, go through `read`."""
    # Identical modules share a class, so that the compiler treats them alike.
    kinds: dict[Any, type[nn.Module]] = {}
    for module in model.modules():
        own = module.named_parameters(recurse=False)
        names = tuple(name for name, parameter in own if parameter not in without)
        if not names:
            continue
        kind = type(module)
        if (kind, names) not in kinds:
            kinds[kind, names] = _reading(kind, names, read)
        module.__class__ = kinds[kind, names]


def _reading(
    kind: type[nn.Module], names: Iterable[str], read: Callable[[Any], Tensor]
) -> type[nn.Module]:
    """Create a subclass of `kind` whose parameters `names` are read through `read`."""

    def reader(name: str) -> property:
        # Through `_parameters`, from which parameters are listed and loaded.
        return property(lambda module: read(module._parameters[name]))

    return type(kind.__name__, (kind,), {name: reader(name) for name in names})


def compute_in(part: nn.Module, dtype: torch.dtype) -> None:
    """Apply mixed precision without sharding: parameters and inputs are cast where they are used.

    A gradient has the dtype of its parameter. FSDP2 over one rank gives the same numbers, but
    copies every parameter and gradient (docs/gpu.md).
    """

    def cast_inputs(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in inputs
        )

    part.register_forward_pre_hook(cast_inputs)
    map_parameter_reads(part, partial(torch.Tensor.to, dtype=dtype))


SHARDING = Registry[type[ShardingConfig]]("sharding", {"fsdp2": FSDP2})
"""Ways to split parameters among ranks, by their names in recipes."""
