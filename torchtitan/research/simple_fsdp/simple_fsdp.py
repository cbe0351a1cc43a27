"""Data parallelism as plain tensor operations that a compiler sees (SimpleFSDP; Zhang et al., 2024,
arXiv:2411.00284).

FSDP2 gathers parameters in hooks, outside compiled code. Here each parameter is a DTensor, and its
module has a property of the same name that returns the whole: reading `self.weight` gathers it, and
its backward reduces and scatters the gradient. So a compiled model is one graph with every
collective in it, for passes over that graph to free, merge and move (`bucketing`).

Parameters have the same names and sharding as in FSDP2, so checkpoints of one load in the other.
Gradients are summed, never averaged, as in `fsdp2`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from torch import nn

from torchtitan.checks.model import model_of
from torchtitan.config import Context, Problem, between, has_wing, import_wing, needs_wing
from torchtitan.parallel.settings import ReshardPolicy
from torchtitan.parallel.sharding import Sharding, ShardingConfig, ShardingTarget
from torchtitan.parallel.stages import Unit
from torchtitan.research.common import gathered
from torchtitan.research.simple_fsdp import bucketing
from torchtitan.research.simple_fsdp.bucketing import Bucketing

SECTIONS = ("compile", "training", "parallelism", "sharding.name")


def _known(name: str) -> str:
    if not has_wing("plan"):
        return name
    known = import_wing("torchtitan.plan.hardware", "sharding.hardware").hardware_names()
    if name not in known:
        raise ValueError(f"allowed: {', '.join(known)}")
    return name


class SimpleFSDP(ShardingConfig):
    """Gathers and reductions as operations of the model, which can then be one graph."""

    in_graph: ClassVar[bool] = True

    name: Literal["simple_fsdp"] = "simple_fsdp"
    """Method of sharding."""
    bucketing: Bucketing = "none"
    """Collectives that are merged into one: none; those of a block; as many as fit in bucket_mb
    (size); or as torch's scheduler decides (auto)."""
    bucket_mb: float = Field(100, gt=0)
    """With bucketing = size: maximum megabytes of a bucket."""
    hardware: Annotated[str, AfterValidator(_known)] = "h100"
    """With bucketing = auto: hardware whose rates estimate times, as in `torchtitan plan`. All
    ranks must use the same rates, since ranks that order collectives differently wait forever."""

    def problems(self, context: Context) -> Iterator[Problem]:
        estimates = ("auto", "block") if context.world.device_type == "cuda" else ("auto",)
        if self.bucketing in estimates and not has_wing("plan"):
            yield Problem("bucketing", needs_wing("plan"))
        yield from between(self._conflicts(context))

    def _conflicts(self, context: Context) -> Iterator[Problem]:
        """Yield conflicts: gathers in the graph need the compiler to free, merge and move them."""
        c, p, name = (
            context.recipe.compile,
            context.recipe.parallelism,
            f'{context.key}.name = "{self.name}"',
        )
        model, degrees = model_of(context.recipe), context.recipe.degrees(context.world.ranks)
        if p.tensor_parallel_degree > 1 and degrees.fsdp > 1 and model is not None:
            first = {len(weight): each for each, weight in model.empty().named_parameters()}
            if min(first) < degrees.fsdp:
                message = (
                    f"{name} cannot shard {first[min(first)]} of {model.title}, whose first dim "
                    f'is {min(first)}, over {degrees.fsdp} ranks; use "fsdp2" there'
                )
                yield Problem("parallelism.tensor_parallel_degree", message, SECTIONS)
        if context.recipe.training.enable_cpu_offload:
            message = f'{name} gathers on the device of the parameters; use "fsdp2" there'
            yield Problem("training.enable_cpu_offload", message, SECTIONS)
        if p.enable_async_tensor_parallel:
            message = f'{name} changes the same graphs; use "fsdp2" there'
            yield Problem("parallelism.enable_async_tensor_parallel", message, SECTIONS)
        if not c.compiles("model"):
            yield from self._without_compiler(p.fsdp_reshard_after_forward, name)
            return
        if c.granularity != "model":
            message = (
                f"with {name}, blocks that share a graph cannot be freed or merged separately, "
                'nor can parameters outside of blocks; use "model"'
            )
            yield Problem("compile.granularity", message, SECTIONS)
        if c.backend != "inductor":
            message = f'with {name}, inductor frees and merges; use "inductor"'
            yield Problem("compile.backend", message, SECTIONS)

    def _without_compiler(self, reshard: ReshardPolicy, name: str) -> Iterator[Problem]:
        needs = (
            'so it needs compile.enable = true with "model" in compile.components and '
            'compile.granularity = "model"'
        )
        if reshard == "always":
            message = f"with {name} the compiler frees them, {needs}"
            yield Problem("parallelism.fsdp_reshard_after_forward", message, SECTIONS)
        if self.bucketing != "none":
            message = f"collectives are merged in a compiled graph, {needs}"
            yield Problem("sharding.bucketing", message, SECTIONS)
        if reshard == "default":
            message = (
                "without compile.enable, it keeps gathered parameters from the forward until the "
                "backward (the whole model, except recomputed blocks), and gathers each "
                "parameter separately"
            )
            yield Problem("sharding.name", message, SECTIONS, "note")

    def verified_as(self) -> Mapping[str, tuple[Any, str]]:
        return {"bucketing": ("none", "the compiler does it")}

    def open(self, target: ShardingTarget) -> "InGraph":
        return InGraph(self, target)


class InGraph(Sharding):
    """SimpleFSDP, applied to this rank's parts of a model."""

    def __init__(self, config: SimpleFSDP, target: ShardingTarget) -> None:
        self.config, self.target = config, target
        self.is_one_graph = target.compile.compiles("model")

    def compile_options(
        self, blocks: Mapping[str, nn.Module], units: Sequence[Unit]
    ) -> dict[str, Any] | None:
        """Return the graph passes that free, merge and move collectives, as compiler options."""
        if not self.is_one_graph:
            return None
        target, mesh = self.target, self.target.mesh
        freed: dict[ReshardPolicy, tuple[str, ...]] = {
            "always": ("",),
            "default": tuple(name for name in blocks if name != target.last_block),
            "never": (),
        }
        plan = bucketing.BucketingPlan(
            groups=tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim)),
            units=tuple(units),
            freed=freed[target.reshard],
            bucketing=self.config.bucketing,
            megabytes=self.config.bucket_mb,
            overlaps=target.overlaps,
            hardware=self.config.hardware,
        )
        return plan.options()

    def apply(self, part: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Make every parameter of `part` gathered when it is read."""
        target = self.target
        gathered.apply(part, target.mesh, target.tensor_mesh, target.precision)

    def confirm(self) -> None:
        if self.is_one_graph:
            bucketing.confirm(self.config.bucketing, self.config.hardware)
