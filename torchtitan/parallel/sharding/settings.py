"""What all ways to shard have in common: their settings, and what one does to a model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.comm import CommunicationConfig
from torchtitan.config import Config
from torchtitan.models.spec import TensorRole
from torchtitan.optim import NamedParameter
from torchtitan.optim.matrices import Lying
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.settings import Precision, ReshardPolicy
from torchtitan.parallel.stages import Unit
from torchtitan.parallel.technique import Technique
from torchtitan.parallel.work import Part, Traffic, largest_block, outside_blocks


@dataclass(frozen=True)
class Target:
    """What a model is sharded for."""

    mesh: DeviceMesh
    """Of the ranks that share the parameters: (copies, parts); (parts) without copies, or where
    they agree by themselves."""
    tensor_mesh: DeviceMesh
    precision: Precision
    reshard: ReshardPolicy
    """Whether a block is freed after its forward: `always`; `never`; `default`: all but the last
    of the model, which the backward needs at once."""
    last_block: str
    """Its name."""
    compile: CompileConfig
    communication: CommunicationConfig
    cpu_offload: bool
    device_type: str
    tensor_plan: Mapping[str, TensorRole] = field(default_factory=dict)
    """What modules are to tensor parallelism, by their names in the model."""
    heads: int = 1
    """Ranks that divide this can have whole heads, of queries and of keys; 1: they cannot."""
    vocabulary_chunk: int = 0
    """Of the loss; 0: it is computed from logits."""


class Sharding(Technique):
    """A way to shard at work on the parts of a model that this rank has."""

    def compile_options(
        self, blocks: Mapping[str, nn.Module], units: Sequence[Unit]
    ) -> dict[str, Any] | None:
        """The options of `torch.compile` for a part of the model, before `apply`.

        Args:
            blocks: those of the part, by name.
            units: names of the modules that are gathered together.
        """
        return None

    def apply(self, part: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Split and copy the parameters of a part of the model over the mesh, in place."""
        raise NotImplementedError

    def before_backward(self, is_last: bool) -> None:
        """Before a microbatch without a pipeline: whether its gradients are the step's last."""


class ShardingConfig(Config):
    """Settings of a way to shard; `name` picks the subclass."""

    in_graph: ClassVar[bool] = False
    """Whether gathers and reductions are part of the computation, where a compiler sees them."""
    packs_weights: ClassVar[bool] = False
    """Whether a parameter may say in what form it is gathered, as those in Float8 do."""
    never_whole: ClassVar[bool] = False
    """Whether no rank ever has a whole matrix, for others to cut, to convert or to compile."""
    follows: ClassVar[frozenset[str]] = frozenset()
    """Which choices of `[communication]` it follows: weights, gradients."""

    name: str = Field(description="Which way: a key of torchtitan.parallel.sharding.SHARDING.")

    def verified_as(self) -> Mapping[str, tuple[Any, str]]:
        """Keys of these settings that are changed to compare a layout with one rank, each to which
        value and why; nothing is compiled then."""
        return {}

    def open(self, target: Target) -> Sharding:
        """What shards the model."""
        raise NotImplementedError

    @property
    def neighbors(self) -> int:
        """Ranks over which freed parameters stay split, to be gathered again; 0: all."""
        return 0

    @property
    def accumulates_whole(self) -> bool:
        """Whether each rank adds up whole gradients of accumulated microbatches."""
        return False

    def memory(self, parts: Sequence[Part]) -> float:
        """Bytes of parameters and gradients that are whole on a rank for the time of their use.

        Args:
            parts: the stages of the rank.
        """
        work = parts[0].work
        # A block and the next are whole, or the embedding, which is in no block.
        whole = max(2 * largest_block(parts), outside_blocks(parts))
        if work.reshard == "never":
            whole = sum(part.sizes.total() for part in parts)
        each = work.precision.compute.itemsize + work.precision.reduce.itemsize
        return whole / work.degrees.tp * each

    def messages(self, part: Part) -> Iterator[Traffic]:
        """Traffic of the parameters of a part of the model in a step."""
        raise NotImplementedError(f"there are no formulas of what {self.name} sends")

    def lie(self, part: Part, parameter: NamedParameter) -> Lying:
        """How a matrix in `part` is placed on the ranks that share parameters."""
        raise NotImplementedError(f"there are no formulas of how {self.name} splits matrices")

    def reductions(self, passes: int, microbatches: int) -> int:
        """How often in a step a gradient is brought to where its parameter is.

        Args:
            passes: batches in a step.
            microbatches: of each batch.
        """
        return passes
