"""Base classes of shardings: their settings, and their application to a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.comm import CommunicationConfig
from torchtitan.config import Config
from torchtitan.models.spec import TensorRole
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.settings import Precision, ReshardPolicy
from torchtitan.parallel.stages import Unit


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
    ends: tuple[Unit, Unit]
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


class Sharding:
    """Sharding of the parts of a model that this rank has."""

    def compile_options(
        self, blocks: Mapping[str, nn.Module], units: Sequence[Unit]
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

    def open(self, target: ShardingTarget) -> Sharding:
        """Return the sharding for `target`."""
        raise NotImplementedError

    @property
    def neighbors(self) -> int:
        """Number of ranks over which freed parameters stay split until regathered; 0: all."""
        return 0

    @property
    def accumulates_whole(self) -> bool:
        """Whether each rank accumulates whole gradients over microbatches."""
        return False
