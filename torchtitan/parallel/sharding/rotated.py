"""Data parallelism whose weights travel around a ring (RTP; Luo et al., 2023, arXiv:2311.01635).

Every rank owns rows of each matrix, and computes its own inputs with the rows of one rank after
the other, which go from neighbour to neighbour. So no rank ever has a whole matrix: of its weights
there are three parts at most, the own, one that is computed with, and one that is arriving.

    forward    W - 1 hops of the weights
    backward   W - 1 hops of the weights, and W of the gradients: each gradient travels with its
               rows, and is added to on every rank, until it is home

The published code sends the own rows away too, and back in the backward. Here they stay, and copies
travel: so a forward without a backward, as in an evaluation, or a second one, as in recomputation,
leaves every rank with what it owns. What is no matrix is gathered where it is read (`simple_fsdp`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from torchtitan.parallel.sharding import simple_fsdp
from torchtitan.parallel.sharding.settings import Precision, Sharding, ShardingConfig, Target
from torchtitan.parallel.traffic_formulas import Traffic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.tensor import DTensor

    from torchtitan.parallel.traffic import Part


class Rotated(ShardingConfig):
    """Weights travel around a ring of ranks."""

    never_whole: ClassVar[bool] = True

    name: Literal["rotated"] = Field("rotated", description="Which way to shard.")

    def open(self, target: Target) -> "Ring":
        return Ring(target)

    def traffic(self, part: "Part") -> Iterator[Traffic]:
        """A message for each hop; what is no matrix is gathered wherever it is read."""
        work, precision = part.work, part.work.layout.precision
        hops = work.degrees.fsdp - 1
        for name, parameter in part.module.named_parameters():
            module = part.module.get_submodule(name.rpartition(".")[0])
            shape, again = part.shape(name, parameter.shape), part.is_again(name)
            if not isinstance(module, nn.Linear | nn.Embedding):
                reads = work.times * (2 if again else 1)
                yield from part.of_unit(
                    {name: shape}, gathers=reads, scatters=work.times, sums=work.times
                )
                continue
            passes = 1 + again + isinstance(module, nn.Linear)
            size = shape.numel()
            yield Traffic(
                *("fsdp", "parameters", "send"),
                bytes=size * precision.compute.itemsize,
                count=hops * passes * work.times,
            )
            yield Traffic(
                *("fsdp", "gradients", "send"),
                bytes=size * precision.reduce.itemsize,
                count=(hops + 1) * work.times if hops else 0,
            )


class Neighbours(NamedTuple):
    """The ring, as one rank sees it."""

    group: ProcessGroup

    @property
    def size(self) -> int:
        return self.group.size()

    def visitor(self, hop: int) -> int:
        """Whose rows are here after so many hops."""
        return (self.group.rank() - hop) % self.size

    def pass_on(self, *sent: Tensor) -> tuple[list[Tensor], list[Work]]:
        """Begin to send tensors to the next rank; what arrives from the one before."""
        rank = self.group.rank()
        to, of = (dist.get_global_rank(self.group, (rank + n) % self.size) for n in (1, -1))
        arriving = [torch.empty_like(tensor) for tensor in sent]
        operations = [dist.P2POp(dist.isend, tensor, to, self.group) for tensor in sent]
        operations += [dist.P2POp(dist.irecv, tensor, of, self.group) for tensor in arriving]
        return arriving, dist.batch_isend_irecv(operations)


class RingLinear(torch.autograd.Function):
    """`F.linear(x, weight)` of rows that travel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor, ring: Neighbours, precision: Precision) -> Tensor:
        """
        Args:
            x: (..., inputs).
            own: (rows, inputs), as many rows on each rank.

        Returns:
            (..., ranks * rows).
        """
        ctx.ring, ctx.precision = ring, precision
        ctx.save_for_backward(x, own)
        rows, visiting = len(own), own.to(precision.compute)
        out = x.new_empty(*x.shape[:-1], ring.size * rows)
        for hop in range(ring.size):
            arriving, works = ring.pass_on(visiting) if hop < ring.size - 1 else ([visiting], [])
            first = ring.visitor(hop) * rows
            out[..., first : first + rows] = F.linear(x, visiting)
            visiting = _arrived(arriving, works)[0]
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (x, own), ring, precision = ctx.saved_tensors, ctx.ring, ctx.precision
        rows, visiting = len(own), own.to(precision.compute)
        of_x = torch.zeros_like(x, dtype=precision.reduce) if ctx.needs_input_grad[0] else None
        flat = x.flatten(0, -2)
        gradient = torch.zeros_like(own, dtype=precision.reduce)
        for hop in range(ring.size):
            arriving, works = ring.pass_on(visiting) if hop < ring.size - 1 else ([visiting], [])
            first = ring.visitor(hop) * rows
            of_rows = of_out[..., first : first + rows]
            gradient += of_rows.flatten(0, -2).T @ flat
            if of_x is not None:
                of_x += of_rows @ visiting
            visiting = _arrived(arriving, works)[0]
            if ring.size > 1:
                gradient = _arrived(*ring.pass_on(gradient))[0]
        return None if of_x is None else of_x.to(x.dtype), gradient.to(own.dtype), None, None


class RingEmbedding(torch.autograd.Function):
    """`F.embedding(tokens, weight)` of rows that travel."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, tokens: Tensor, ring: Neighbours, precision: Precision
    ) -> Tensor:
        """
        Args:
            own: (rows, D), as many rows on each rank.
            tokens: (...), the rows to look up.
        """
        ctx.ring, ctx.precision = ring, precision
        ctx.save_for_backward(own, tokens)
        visiting = own.to(precision.compute)
        out = visiting.new_zeros(*tokens.shape, own.shape[1])
        for hop in range(ring.size):
            arriving, works = ring.pass_on(visiting) if hop < ring.size - 1 else ([visiting], [])
            local, is_there = _among(tokens, ring.visitor(hop) * len(own), len(own))
            out += F.embedding(local, visiting) * is_there
            visiting = _arrived(arriving, works)[0]
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, None, None, None]:
        (own, tokens), ring, precision = ctx.saved_tensors, ctx.ring, ctx.precision
        gradient = torch.zeros_like(own, dtype=precision.reduce)
        for hop in range(ring.size):
            local, is_there = _among(tokens, ring.visitor(hop) * len(own), len(own))
            of_rows = (of_out * is_there).flatten(0, -2).to(precision.reduce)
            gradient.index_add_(0, local.flatten(), of_rows)
            if ring.size > 1:
                gradient = _arrived(*ring.pass_on(gradient))[0]
        return gradient.to(own.dtype), None, None, None


def _among(tokens: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Which of the rows tokens are, and whether they are any of them (..., 1)."""
    is_there = (tokens >= first) & (tokens < first + rows)
    return torch.where(is_there, tokens - first, 0), is_there[..., None]


def _arrived(arriving: list[Tensor], works: list[Work]) -> list[Tensor]:
    for work in works:
        work.wait()
    works.clear()  # they keep what was sent
    return arriving


class Ring(Sharding):
    """Rotated weights at work."""

    def __init__(self, target: Target) -> None:
        self.target = target
        mesh = target.mesh
        self.ring = Neighbours(mesh.get_group(mesh.ndim - 1))
        self.copies = [mesh.get_group(axis) for axis in range(mesh.ndim - 1)]
        self.rotated: list[nn.Parameter] = []

    def apply(self, part: nn.Module, blocks: "Mapping[str, nn.Module]") -> None:
        target = self.target
        kinds: dict[type[nn.Module], Callable[..., Tensor]]
        kinds = {nn.Linear: _linear, nn.Embedding: _embedding}
        matrices = [module for module in part.modules() if type(module) in kinds]
        for module in matrices:
            weight = simple_fsdp.laid_out(cast(nn.Parameter, module.weight), target.mesh)
            module.register_parameter("weight", weight)
            self.rotated.append(weight)
            rotating = partial(kinds[type(module)], module, self.ring, target.precision)
            module.forward = rotating
        simple_fsdp.apply(
            part, target.mesh, target.tensor_mesh, target.precision, without=set(matrices)
        )

    def after_backward(self) -> None:
        """Copies add up what the ring has brought home."""
        for group in self.copies:
            for weight in self.rotated:
                if weight.grad is not None:
                    dist.all_reduce(cast("DTensor", weight.grad).to_local(), group=group)


def _linear(module: nn.Linear, ring: Neighbours, precision: Precision, x: Tensor) -> Tensor:
    own = _padded(module.weight, ring.size)
    out: Tensor = RingLinear.apply(x, own, ring, precision)  # type: ignore[no-untyped-call]
    return out[..., : module.out_features]


def _embedding(
    module: nn.Embedding, ring: Neighbours, precision: Precision, tokens: Tensor
) -> Tensor:
    own = _padded(module.weight, ring.size)
    out: Tensor = RingEmbedding.apply(own, tokens, ring, precision)  # type: ignore[no-untyped-call]
    return out


def _padded(weight: Tensor, ranks: int) -> Tensor:
    """This rank's rows, filled up to as many as the first rank has."""
    own: Tensor = cast("DTensor", weight).to_local()
    return F.pad(own, (0, 0, 0, -(-len(weight) // ranks) - len(own)))
