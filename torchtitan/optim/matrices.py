"""Redistribution of sharded matrices, so that each is whole on one rank at a time.

An update that needs all of a matrix is computed once, by one of the ranks that share it. Matrices
are assigned to ranks evenly by cost and processed in rounds: an all-to-all gathers the shards of a
few matrices on each rank, the rank computes, and an all-to-all scatters the results back. While a
round is computed, the next one is being gathered and the last results are being scattered.

Replicas of a parameter share the work like other ranks and receive identical bits. The schedule
follows from shapes and placements alone, so ranks need not communicate to agree on it.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.optim.parameters import NamedParameter
from torchtitan.torch_private.distributed import timeout_of
from torchtitan.torch_private.dtensor import extents, ranks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Area(NamedTuple):
    """Rows and columns of a parameter, or of some of the matrices in one of three dims."""

    rows: range
    columns: range
    matrices: range = range(1)

    @classmethod
    def from_dims(cls, dims: Sequence[range]) -> "Area":
        """Return the area with these ranges of a tensor of two or three dims."""
        *matrices, rows, columns = dims
        return cls(rows, columns, *matrices)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.rows) * len(self.columns) * len(self.matrices)

    def __and__(self, other: "Area") -> "Area":
        """Return the intersection."""
        rows, columns, matrices = (_both(*pair) for pair in zip(self, other, strict=True))
        return Area(rows if matrices else rows[:0], columns, matrices)

    def of(self, tensor: Tensor, begin: "Area") -> Tensor:
        """Return a view of this area of `tensor`, which holds the area `begin` of the parameter."""
        rows, columns, matrices = (
            slice(mine.start - theirs.start, mine.stop - theirs.start)
            for mine, theirs in zip(self, begin, strict=True)
        )
        return tensor[..., rows, columns] if tensor.ndim == 2 else tensor[matrices, rows, columns]


def _both(one: range, other: range) -> range:
    begin = max(one.start, other.start)
    return range(begin, max(begin, min(one.stop, other.stop)))


class Matrix(NamedTuple):
    """Matrix that is whole for an update: a parameter, or some rows or columns of it."""

    parameter: int
    """Index of its parameter in the exchange."""
    area: Area


class MatrixSharding(NamedTuple):
    """Sharding of a parameter of two or three dims over ranks."""

    parts: Sequence[Area]
    """Area of each rank."""
    copies: Sequence[tuple[int, ...]]
    """Replica that each rank holds a part of."""


Update = Callable[[Tensor], Tensor]
"""Function from matrices of one shape (number, rows, columns) to their replacements."""
Round = Sequence[Sequence[Matrix]]
"""Matrices, all of one shape, that each rank computes on at the same time, by rank."""


class Exchange:
    """Gathers whole matrices, and scatters the results of an update."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        matrices: Callable[[NamedParameter], Sequence[Area]],
        cost: Callable[[int, int], float],
        limit: int,
    ) -> None:
        """
        Args:
            parameters: parameters of two dims, or of three with a matrix in each of the first.
            matrices: returns the areas of a parameter that are matrices.
            cost: cost of an update, by rows and columns.
            limit: maximum elements of whole matrices per rank and round, unless one matrix has
                more.
        """
        found = [Matrix(n, area) for n, p in enumerate(parameters) for area in matrices(p)]
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
        matrices = sum(len(of_rank) for g in self.groups for r in g.rounds for of_rank in r)
        own = sum(len(r[g.rank]) for g in self.groups for r in g.rounds)
        rounds = sum(len(g.rounds) for g in self.groups)
        return f"{matrices} matrices in {rounds} rounds, {own} of them on this rank"

    def apply(self, tensors: Sequence[Tensor], update: Update) -> None:
        """Replace each matrix by `update` of it.

        Args:
            tensors: this rank's part of each parameter, all of one dtype.
        """
        for group in self.groups:
            group.apply(tensors, update)


class _Group:
    """Parameters on one mesh, or those of this rank alone."""

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
        self.shardings = {
            number: MatrixSharding(
                [Area.from_dims(extents(p.tensor, at)) for at in coordinates],
                [
                    tuple(i for i, how in zip(at, p.placements, strict=True) if how.is_replicate())
                    for at in coordinates
                ],
            )
            for number, p in parameters.items()
        }
        self.rounds = assign_to_ranks(matrices, len(coordinates), cost, limit)

    def part(self, matrix: Matrix, rank: int) -> Area:
        """Return a rank's part of a matrix."""
        return matrix.area & self.held(matrix, rank)

    def held(self, matrix: Matrix, rank: int) -> Area:
        """Return a rank's part of the matrix's parameter."""
        return self.shardings[matrix.parameter].parts[rank]

    def same_copy(self, matrix: Matrix, one: int, other: int) -> bool:
        """Whether two ranks hold parts of the same replica of a matrix, and so exchange them."""
        copies = self.shardings[matrix.parameter].copies
        return copies[one] == copies[other]

    def apply(self, tensors: Sequence[Tensor], update: Update) -> None:
        """See `Exchange.apply`."""
        rounds = self.rounds
        arriving, leaving = self._gather(rounds[0], tensors), None
        for number, current in enumerate(rounds):
            whole = arriving()
            if number + 1 < len(rounds):
                arriving = self._gather(rounds[number + 1], tensors)
            result = update(whole) if len(whole) else whole
            del whole  # as large as all matrices of the round
            if leaving is not None:
                leaving()
            leaving = self._scatter(current, result, tensors)
            del result
        if leaving is not None:
            leaving()

    def _gather(self, current: Round, tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Start a round; the result waits for this rank's matrices (number, rows, columns).

        Each rank receives the parts from its own replica of a parameter.
        """
        here = self.rank
        own = current[here]
        sent = [
            [
                self.part(matrix, here).of(tensors[matrix.parameter], self.held(matrix, here))
                for matrix in of_rank
                if self.same_copy(matrix, rank, here)
            ]
            for rank, of_rank in enumerate(current)
        ]
        expected = [
            [
                (number, self.part(matrix, rank))
                for number, matrix in enumerate(own)
                if self.same_copy(matrix, rank, here)
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
        """Start to scatter results; the returned function writes them into this rank's parts."""
        own = current[self.rank]
        sent = [
            [
                self.part(matrix, rank).of(result, matrix.area)
                for matrix, result in zip(own, results, strict=True)
            ]
            for rank in range(len(current))
        ]
        expected = [[(m, self.part(m, self.rank)) for m in of_rank] for of_rank in current]
        sizes = [[part.size for _, part in of_rank] for of_rank in expected]
        received = self._send(sent, sizes, tensors[0])

        def placed() -> None:
            for places, pieces in zip(expected, received(), strict=True):
                for (matrix, part), piece in zip(places, pieces, strict=True):
                    target = part.of(tensors[matrix.parameter], self.held(matrix, self.rank))
                    target.copy_(piece.view(part.shape))

        return placed

    def _send(
        self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
    ) -> Callable[[], Sequence[Sequence[Tensor]]]:
        """Send each rank its pieces; the returned function waits for the pieces sent to this rank.

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
            del message  # must stay alive until then
            pieces = iter(torch.split(received, [size for of_rank in sizes for size in of_rank]))
            return [[next(pieces) for _ in of_rank] for of_rank in sizes]

        return wait


def assign_to_ranks(
    matrices: Sequence[Matrix], ranks: int, cost: Callable[[int, int], float], limit: int
) -> list[Round]:
    """Assign matrices to ranks and rounds.

    The most expensive come first, each to the rank with the smallest load (Graham, 1969: the
    longest rank has at most 4/3 of the optimum), so all ranks have about equal work in a round.
    """
    costs = {matrix: cost(*matrix.area.shape) for matrix in matrices}
    loads, dealt = [0.0] * ranks, [list[list[Matrix]]() for _ in range(ranks)]
    # Python's sort is stable: equal costs stay in order of the parameters, and so by shape.
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
    """Return a process group of all ranks of a mesh; None for a single rank."""
    used = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if len(used) <= 1:
        return mesh.get_group(used[0]) if used else None
    if mesh.size() == dist.get_world_size():
        everyone: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        return everyone
    # Ranks of other meshes may have no matrices and need not take part.
    group: dist.ProcessGroup = dist.new_group(
        sorted(ranks_of(mesh).flatten().tolist()),
        timeout=timeout_of(mesh.get_group(used[0]), mesh.device_type),
        use_local_synchronization=True,
        group_desc="matrices",
    )
    return group


def _coordinates(mesh: "DeviceMesh", group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """Return the mesh coordinates of each rank of a group, or of this rank."""
    ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    everyone = ranks_of(mesh)
    return [tuple(int(at[0]) for at in (everyone == rank).nonzero()) for rank in ranks]
