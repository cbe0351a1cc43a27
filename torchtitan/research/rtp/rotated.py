"""Data parallelism whose weights travel around a ring (RTP; Luo et al., 2023, arXiv:2311.01635).

Every rank owns a part of each matrix, and multiplies its own inputs with the parts of one rank
after the other (`ring`). So no rank ever has a whole matrix. The split follows from the model's
`tensor_plan`, as in tensor parallelism:

    embedding                 rows of the vocabulary; results are summed
    linear                    outputs, which are concatenated
    linear, "rowwise"         inputs; results are summed
    module, "input_gather"    heads of attention, or features between two linears: the parts of all
                              linears inside travel together, and results are summed
    loss in chunks            rows of the vocabulary; log-sum-exps are combined

The linears of an attention travel one by one if the ranks do not divide its heads, or if it shares
a sequence with other ranks. Other parameters are gathered when they are read (`common.gathered`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.checks.model import model_of
from torchtitan.config import Context, Problem, between
from torchtitan.losses import summed
from torchtitan.models.attention import attends
from torchtitan.models.output import LinearLoss
from torchtitan.models.spec import tensor_roles
from torchtitan.parallel.sharding import Sharding, ShardingConfig, ShardingTarget
from torchtitan.research.common import gathered
from torchtitan.research.rtp.ring import Neighbours, RingHop, rotate

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PIECES = {"cpu": 2**20, "cuda": 2**25}
"""Bytes replaced at a time when parts are replaced in place, by device: each piece is an exchange,
of which a large model would have tens of thousands in a step if they were small."""


class Rotated(ShardingConfig):
    """Sharding whose weights travel around a ring of ranks."""

    never_whole: ClassVar[bool] = True

    name: Literal["rotated"] = "rotated"
    """Method of sharding."""
    in_place: bool = False
    """Replace the sent shards by received ones piece by piece (32 MiB on CUDA). This saves memory,
    but does not overlap communication with computation."""

    def problems(self, context: Context) -> Iterator[Problem]:
        yield from between(self._conflicts(context))

    def _conflicts(self, context: Context) -> Iterator[Problem]:
        """Yield conflicts with features that need whole matrices, which no rank has."""
        p, name = context.recipe.parallelism, f'{context.key}.name = "{self.name}"'
        others = {
            "parallelism.tensor_parallel_degree": (
                p.tensor_parallel_degree > 1,
                "splits matrices whose shards are already rotated",
            ),
            "parallelism.pipeline_parallel_degree": (
                p.pipeline_parallel_degree > 1,
                "has stages that compute at different times, but a ring needs all ranks at once",
            ),
            "compile.enable": (
                context.recipe.compile.compiles("model"),
                "would compile blocks whose shards arrive from outside the graph",
            ),
            "convert": (bool(context.recipe.convert), "needs whole matrices"),
            "training.enable_cpu_offload": (
                context.recipe.training.enable_cpu_offload,
                "keeps parameters away from the device that computes",
            ),
        }
        for other, (is_on, why) in others.items():
            if is_on:
                message = f'{other} {why}; use "fsdp2", or leave {other} out'
                yield Problem(f"{context.key}.name", message, (other,))
        model = model_of(context.recipe)
        if model and model.spec.tied(model.args) and not context.recipe.loss.vocabulary_chunk:
            message = (
                f"with {name} no rank has the whole embedding of a tied model, so the loss must "
                "be computed in chunks; use a number above 0, such as 8192"
            )
            yield Problem("loss.vocabulary_chunk", message, ("sharding.name", "model"))

    def open(self, target: ShardingTarget) -> "Ring":
        group = target.mesh.get_group(target.mesh.ndim - 1)
        return Ring(target, Neighbours(group, self.in_place, PIECES[target.device_type]))


class RotatedMatrix(NamedTuple):
    """Weight that is split on a dim over the ranks."""

    weight: nn.Parameter
    dim: int

    @property
    def own(self) -> Tensor:
        local: Tensor = cast("DTensor", self.weight).to_local()
        return local

    def shape(self, ranks: int) -> torch.Size:
        """Return the shape of a part, padded so that all are equal."""
        sizes = list(self.weight.shape)
        sizes[self.dim] = -(-sizes[self.dim] // ranks)
        return torch.Size(sizes)


class Ring(Sharding):
    """Rotated weights, applied to this rank's parts of a model."""

    def __init__(self, target: ShardingTarget, ring: Neighbours) -> None:
        self.target, self.ring = target, ring
        mesh = target.mesh
        self.copies = [mesh.get_group(axis) for axis in range(mesh.ndim - 1)]
        self.matrices: dict[nn.Module, RotatedMatrix] = {}

    def apply(self, part: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        target = self.target
        roles = tensor_roles(part, target.tensor_plan)
        for name, module in part.named_modules():
            if type(module) in COMPUTED:
                dim = 1 if roles.get(name) == "rowwise" else 0
                whole = cast(nn.Parameter, module.weight)
                module.register_parameter("weight", gathered.laid_out(whole, target.mesh, dim))
                self.matrices[module] = RotatedMatrix(cast(nn.Parameter, module.weight), dim)
        inside = set()
        for name, module in part.named_modules():
            if roles.get(name) == "input_gather" and self._can_share(module):
                inside |= self._rotate_together(module)
            elif isinstance(module, LinearLoss) and target.vocabulary_chunk:
                module.core = self._loss
        for module in self.matrices.keys() - inside:
            compute = COMPUTED[type(module)]
            module.forward = partial(compute, module, self.matrices[module], self._rotate)
        weights = {matrix.weight for matrix in self.matrices.values()}
        gathered.apply(part, target.mesh, target.tensor_mesh, target.precision, without=weights)

    def complete_gradients(self) -> None:
        """Sum gradients over replicas after the ring has accumulated them."""
        for group in self.copies:
            for weight, _ in self.matrices.values():
                if weight.grad is not None:
                    dist.all_reduce(cast("DTensor", weight.grad).to_local(), group=group)

    def _rotate(
        self, matrices: Sequence[RotatedMatrix], compute: "Compute"
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        own = [matrix.own for matrix in matrices]
        shapes = [matrix.shape(self.ring.size) for matrix in matrices]
        return rotate(own, shapes, self.ring, self.target.precision, compute)

    def _can_share(self, module: nn.Module) -> bool:
        """Whether the module's heads or features can be divided among the ranks."""
        are_whole = not attends(module) or self.target.heads % self.ring.size == 0
        linears = (each for each in module.modules() if each in self.matrices)
        return are_whole and all(getattr(each, "bias", None) is None for each in linears)

    def _rotate_together(self, module: nn.Module) -> set[nn.Module]:
        """Make a module compute with the parts of all its linears at once."""
        forward, linears = module.forward, [m for m in module.modules() if m in self.matrices]
        hops: list[RingHop] = []
        for index, linear in enumerate(linears):
            linear.forward = partial(lambda index, x: hops[-1].linear(x, index), index)

        matrices = [self.matrices[linear] for linear in linears]

        def rotating(*inputs: Any, **named: Any) -> Tensor:
            def compute(hop: RingHop) -> tuple[Tensor, ...]:
                hops[:] = [hop]
                return (forward(*inputs, **named),)

            try:
                return _added(self._rotate(matrices, compute))
            finally:  # recomputation stops with an exception
                hops.clear()

        module.forward = rotating
        return set(linears)

    def _loss(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Compute the core of a `LinearLoss` from chunks of the logits of each part in turn."""
        compiler = self.target.compile
        backend = compiler.backend if compiler.compiles("loss") else ""
        matrix = next(m for m in self.matrices.values() if m.weight is weight)

        def compute(hop: RingHop) -> tuple[Tensor, ...]:
            hidden, rows = x.flatten(0, -2), len(weight)
            chunk = self.target.vocabulary_chunk
            return hop.statistics(hidden, targets.flatten(), chunk, backend, rows)

        parts = [out for _, out in self._rotate([matrix], compute)]
        lse, of_target = (torch.stack(part) for part in zip(*parts, strict=True))
        return summed(lse.logsumexp(0), of_target.sum(0), targets.flatten())


Compute = Callable[[RingHop], tuple[Tensor, ...]]
Rotate = Callable[[Sequence[RotatedMatrix], Compute], Iterator[tuple[int, tuple[Tensor, ...]]]]


def _product(module: nn.Linear, matrix: RotatedMatrix, rotate: Rotate, x: Tensor) -> Tensor:
    """Compute a single linear layer."""
    if matrix.dim == 0:
        by_rank = dict(rotate([matrix], lambda hop: (hop.linear(x),)))
        out = torch.cat([out for _, (out,) in sorted(by_rank.items())], -1)
        out = out[..., : module.out_features]
    else:
        out = _added(rotate([matrix], lambda hop: (hop.linear(hop.inputs(x)),)))
    return out if module.bias is None else out + module.bias


def _embedded(
    module: nn.Embedding, matrix: RotatedMatrix, rotate: Rotate, tokens: Tensor
) -> Tensor:
    return _added(rotate([matrix], lambda hop: (hop.embedding(tokens),)))


def _added(parts: Iterator[tuple[int, tuple[Tensor, ...]]]) -> Tensor:
    _, (total,) = next(parts)
    for _, (out,) in parts:
        total = total + out
    return total


COMPUTED: Mapping[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _product,
    nn.Embedding: _embedded,
}
"""Functions of modules whose weights travel one by one."""
