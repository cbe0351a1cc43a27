"""Matrices that lie in parts on several ranks, each of which is whole on one of them at a time.

An update that needs all of a matrix is computed once, by one of the ranks that share it. Matrices
are dealt out evenly by their cost and go around in rounds: an all-to-all brings each rank the parts
of a few matrices, the rank computes, and an all-to-all takes the parts of the results to where they
belong. While a round is computed, the next is on its way, and so are the last results.

Copies of a parameter are ranks like others: they share the work and get the same bits. Who computes
with what follows from shapes and placements alone, so ranks have nothing to agree on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.optim.parameters import NamedParameter
from torchtitan.torch_private.collectives import timeout_of
from torchtitan.torch_private.dtensor import extents

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Area(NamedTuple):
    """Rows and columns of a parameter."""

    rows: range
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    @property
    def size(self) -> int:
        """Elements."""
        return len(self.rows) * len(self.columns)

    def __and__(self, other: "Area") -> "Area":
        """What is in both."""
        return Area(_both(self.rows, other.rows), _both(self.columns, other.columns))

    def of(self, tensor: Tensor, begin: "Area") -> Tensor:
        """A view of it in `tensor`, which is the area `begin` of the parameter."""
        top, left = self.rows.start - begin.rows.start, self.columns.start - begin.columns.start
        return tensor[top : top + len(self.rows), left : left + len(self.columns)]


def _both(one: range, other: range) -> range:
    begin = max(one.start, other.start)
    return range(begin, max(begin, min(one.stop, other.stop)))


class Matrix(NamedTuple):
    """What is whole for an update: a parameter, or some rows or columns of it."""

    parameter: int
    """Which of those of an exchange it is, or is in."""
    area: Area


class Lying(NamedTuple):
    """How a parameter of two dims lies on ranks."""

    parts: Sequence[Area]
    """What each rank holds."""
    copies: Sequence[tuple[int, ...]]
    """Which of its copies each rank holds a part of."""


Update = Callable[[Tensor], Tensor]
"""From matrices of one shape (number, rows, columns) to what takes their places."""
Round = Sequence[Sequence[Matrix]]
"""By rank, the matrices that it computes with at the same time, all of one shape."""


class Plan:
    """Who computes with what, and when, of parameters that lie on the same ranks."""

    def __init__(
        self,
        lying: Mapping[int, Lying],
        matrices: Sequence[Matrix],
        cost: Callable[[int, int], float],
        limit: int,
    ) -> None:
        """For the arguments see `deal`."""
        self.lying = lying
        ranks = len(next(iter(lying.values())).parts) if lying else 1
        self.rounds = deal(matrices, ranks, cost, limit)

    def part(self, matrix: Matrix, rank: int) -> Area:
        """What a rank holds of a matrix."""
        return matrix.area & self.held(matrix, rank)

    def held(self, matrix: Matrix, rank: int) -> Area:
        """What a rank holds of its parameter."""
        return self.lying[matrix.parameter].parts[rank]

    def same_copy(self, matrix: Matrix, one: int, other: int) -> bool:
        """Whether two ranks hold parts of the same copy of a matrix: one sends them the other."""
        copies = self.lying[matrix.parameter].copies
        return copies[one] == copies[other]

    def messages(self, rank: int) -> Iterator[int]:
        """Elements that a rank gives in each all-to-all, with what it gives itself."""
        for current in self.rounds:
            yield sum(
                self.part(matrix, rank).size
                for other, of_rank in enumerate(current)
                for matrix in of_rank
                if self.same_copy(matrix, rank, other)
            )
            others = range(len(current))
            yield sum(self.part(matrix, o).size for matrix in current[rank] for o in others)


class Exchange:
    """Makes matrices whole, and their parts again of what an update gives."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        matrices: Callable[[NamedParameter], Sequence[Area]],
        cost: Callable[[int, int], float],
        limit: int,
    ) -> None:
        """
        Args:
            parameters: of two dims each.
            matrices: the areas of a parameter that are matrices.
            cost: of an update, by rows and columns.
            limit: elements that a rank has whole in a round, unless one matrix has more.
        """
        found = [
            Matrix(number, area) for number, p in enumerate(parameters) for area in matrices(p)
        ]
        meshes = list(dict.fromkeys(parameter.mesh for parameter in parameters))
        self.groups = [
            _Group(
                mesh,
                {n: p for n, p in enumerate(parameters) if p.mesh == mesh},
                [matrix for matrix in found if parameters[matrix.parameter].mesh == mesh],
                cost,
                limit,
            )
            for mesh in meshes
        ]

    def __str__(self) -> str:
        matrices = sum(len(of_rank) for g in self.groups for r in g.plan.rounds for of_rank in r)
        own = sum(len(r[g.rank]) for g in self.groups for r in g.plan.rounds)
        rounds = sum(len(g.plan.rounds) for g in self.groups)
        return f"{matrices} matrices in {rounds} rounds, {own} of them on this rank"

    def apply(self, tensors: Sequence[Tensor], update: Update) -> None:
        """Put what `update` makes of each matrix in its place.

        Args:
            tensors: what this rank holds of each parameter, all of one dtype.
        """
        for group in self.groups:
            group.apply(tensors, update)


class _Group:
    """The parameters on one mesh, or those of this rank alone."""

    def __init__(
        self,
        mesh: "DeviceMesh | None",
        parameters: Mapping[int, NamedParameter],
        matrices: Sequence[Matrix],
        cost: Callable[[int, int], float],
        limit: int,
    ) -> None:
        self.group = None if mesh is None else over(mesh)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        coordinates = [()] if mesh is None else _coordinates(mesh, self.group)
        lying = {
            number: Lying(
                [Area(*extents(p.tensor, at)) for at in coordinates],
                [
                    tuple(i for i, how in zip(at, p.placements, strict=True) if how.is_replicate())
                    for at in coordinates
                ],
            )
            for number, p in parameters.items()
        }
        self.plan = Plan(lying, matrices, cost, limit)

    def apply(self, tensors: Sequence[Tensor], update: Update) -> None:
        """See `Exchange.apply`."""
        rounds = self.plan.rounds
        arriving, leaving = self._gather(rounds[0], tensors), None
        for number, current in enumerate(rounds):
            whole = arriving()
            if number + 1 < len(rounds):
                arriving = self._gather(rounds[number + 1], tensors)
            result = update(whole) if len(whole) else whole
            del whole  # as large as all that is computed with
            if leaving is not None:
                leaving()
            leaving = self._scatter(current, result, tensors)
            del result
        if leaving is not None:
            leaving()

    def _gather(self, current: Round, tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Begin a round; what is returned waits for this rank's matrices (number, rows, columns).

        Each rank takes the parts from its own copy of a parameter.
        """
        plan, here = self.plan, self.rank
        own = current[here]
        sent = [
            [
                plan.part(matrix, here).of(tensors[matrix.parameter], plan.held(matrix, here))
                for matrix in of_rank
                if plan.same_copy(matrix, rank, here)
            ]
            for rank, of_rank in enumerate(current)
        ]
        expected = [
            [
                (number, plan.part(matrix, rank))
                for number, matrix in enumerate(own)
                if plan.same_copy(matrix, rank, here)
            ]
            for rank in range(len(current))
        ]
        sizes = [[part.size for _, part in of_rank] for of_rank in expected]
        received = self._send(sent, sizes, tensors[0])

        def arrived() -> Tensor:
            shape = own[0].area.shape if own else (0, 0)
            whole = tensors[0].new_empty(len(own), *shape)
            for places, pieces in zip(expected, received(), strict=True):
                for (number, part), piece in zip(places, pieces, strict=True):
                    part.of(whole[number], own[number].area).copy_(piece.view(part.shape))
            return whole

        return arrived

    def _scatter(
        self, current: Round, results: Tensor, tensors: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Begin to end a round; what is returned puts the results in this rank's places."""
        own = current[self.rank]
        sent = [
            [
                self.plan.part(matrix, rank).of(result, matrix.area)
                for matrix, result in zip(own, results, strict=True)
            ]
            for rank in range(len(current))
        ]
        expected = [[(m, self.plan.part(m, self.rank)) for m in of_rank] for of_rank in current]
        sizes = [[part.size for _, part in of_rank] for of_rank in expected]
        received = self._send(sent, sizes, tensors[0])

        def placed() -> None:
            for places, pieces in zip(expected, received(), strict=True):
                for (matrix, part), piece in zip(places, pieces, strict=True):
                    target = part.of(tensors[matrix.parameter], self.plan.held(matrix, self.rank))
                    target.copy_(piece.view(part.shape))

        return placed

    def _send(
        self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
    ) -> Callable[[], Sequence[Sequence[Tensor]]]:
        """Send to each rank its pieces; what is returned waits for those of each rank for this one.

        Args:
            sizes: elements of the pieces that come from each rank.
        """
        if self.group is None:
            return lambda: [[piece.reshape(-1) for piece in pieces] for pieces in sent]
        flat = [piece.reshape(-1) for pieces in sent for piece in pieces]
        message = torch.cat(flat) if flat else like.new_empty(0)
        received = like.new_empty(sum(map(sum, sizes)))
        work = dist.all_to_all_single(
            received,
            message,
            [sum(of_rank) for of_rank in sizes],
            [sum(piece.numel() for piece in pieces) for pieces in sent],
            group=self.group,
            async_op=True,
        )

        def wait() -> Sequence[Sequence[Tensor]]:
            nonlocal message
            work.wait()
            del message  # which has to be there until then
            pieces = iter(torch.split(received, [size for of_rank in sizes for size in of_rank]))
            return [[next(pieces) for _ in of_rank] for of_rank in sizes]

        return wait


def deal(
    matrices: Sequence[Matrix], ranks: int, cost: Callable[[int, int], float], limit: int
) -> list[Round]:
    """Which rank computes with which matrices, and when.

    The costliest come first, each to the rank that has the least to do (Graham, 1969, whose longest
    rank has at most 4/3 of the least possible); so in a round all ranks have about as much to do.
    """
    costs = {matrix: cost(*matrix.area.shape) for matrix in matrices}
    loads, dealt = [0.0] * ranks, [list[list[Matrix]]() for _ in range(ranks)]
    # Python sorts stably: what costs as much stays in order of the parameters, and so by shape.
    for matrix in sorted(matrices, key=lambda matrix: (-costs[matrix], matrix.area.shape)):
        rank = loads.index(min(loads))
        loads[rank] += costs[matrix]
        batches, shape = dealt[rank], matrix.area.shape
        last = batches[-1] if batches else []
        if not last or last[0].area.shape != shape or (len(last) + 1) * matrix.area.size > limit:
            batches.append([])
        batches[-1].append(matrix)
    return [*zip_longest(*dealt, fillvalue=())]


def over(mesh: "DeviceMesh") -> dist.ProcessGroup | None:
    """All ranks of a mesh; None where there is only this one."""
    used = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if len(used) <= 1:
        return mesh.get_group(used[0]) if used else None
    if mesh.size() == dist.get_world_size():
        everyone: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        return everyone
    # Ranks of other meshes, which may have no matrices, need not take part.
    group: dist.ProcessGroup = dist.new_group(
        sorted(mesh.mesh.flatten().tolist()),
        timeout=timeout_of(mesh.get_group(used[0]), mesh.device_type),
        use_local_synchronization=True,
        group_desc="matrices",
    )
    return group


def _coordinates(mesh: "DeviceMesh", group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """The place on the mesh of each rank of a group, or of this one."""
    ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    return [tuple((mesh.mesh == rank).nonzero()[0].tolist()) for rank in ranks]
