"""Partitioning of sequences into pieces, their owners, and the attention between these.

Under the causal mask, contiguous parts would give the last rank the most work and the first hardly
any. With `headtail` a sequence is cut into two pieces per rank, and rank r of n takes piece r and
its mirror 2n - 1 - r (the aim of Striped Attention, Brandon et al., 2023, arXiv:2311.09431, in
larger pieces). All queries then attend to the first half of the keys of an earlier rank, and the
second half of the queries to all keys of a later one: one rectangle per rank, all of equal size.

Documents change the work of a piece, from row to row. With `documents` a sequence is cut into more
pieces, whose work follows from the documents; the most expensive piece left goes to the rank with
the smallest sum so far, until each has its number of pieces (Graham, 1969, doi:10.1137/0117039).

Parts keep the order of the sequence, so a document's positions on a rank are neighbors there.
"""

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.models.attention import document_starts
from torchtitan.torch_private.distributed import all_gather, reduce_scatter
from torchtitan.torch_private.segment_kernels import Segment

MOST_PIECES, MIN_PIECE = 8, 128
"""Limits of the pieces of a rank with `documents`: their number, and their length if there are more
than two."""


class Tile(NamedTuple):
    """Queries of one rank and keys of another; if `causal`, each attends up to its own position."""

    queries: slice
    keys: slice
    causal: bool


@dataclasses.dataclass(frozen=True)
class Cut:
    """Partitioning of a sequence among `size` ranks."""

    size: int
    balancing: str

    @property
    def chunks(self) -> int:
        """Number of equal pieces, which divides the length of a sequence."""
        return self.size if self.balancing == "none" or self.size == 1 else 2 * self.size

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Return the part of `whole` (B, whole sequence) that `rank` owns: (B, S)."""
        assert whole.shape[1] % self.chunks == 0, f"{whole.shape[1]} not in {self.chunks} chunks"
        pieces = whole.chunk(self.chunks, dim=1)
        return torch.cat([pieces[index] for index in self.owned(rank)], dim=1)

    def owned(self, rank: int) -> tuple[int, ...]:
        """Return the indices of a rank's pieces, in order."""
        assert self.size == 1 or self.balancing != "documents", "pieces differ from row to row"
        return (rank,) if self.chunks == self.size else (rank, self.chunks - 1 - rank)

    def tile(self, rank: int, owner: int, length: int) -> Tile | None:
        """Return the queries of `rank` that attend to keys of `owner`, both `length` long, if any.

        A rank's own tile is an ordinary causal one.
        """
        whole, half = slice(0, length), length // 2
        if owner == rank:
            return Tile(whole, whole, causal=True)
        if self.balancing == "none":
            return Tile(whole, whole, causal=False) if owner < rank else None
        if owner < rank:
            return Tile(whole, slice(0, half), causal=False)
        return Tile(slice(half, length), whole, causal=False)

    def rows(self, documents: Tensor, window: int) -> tuple["SplitRow", ...]:
        """Return the rows of a batch, equal on all ranks.

        Args:
            documents: (B, whole sequence) int64, the document of each token; on the CPU.
            window: number of most recent tokens that a token attends to; 0: all.
        """
        return tuple(_row(self, starts, window) for starts in document_starts(documents))

    def masked(self, q: Tensor, documents: Tensor | None, window: int) -> tuple["SplitRow", ...]:
        """Return the rows of a batch; none if all tokens are visible to all later ones.

        Args:
            q: (B, H, S, E), this rank's part.
        """
        length = q.shape[2] * self.size
        if documents is None and 0 < window < length:
            documents = torch.zeros(len(q), length, dtype=torch.int64)
        return () if documents is None else self.rows(documents, window)


class SplitRow(NamedTuple):
    """Documents of a sequence, and the owners of its pieces."""

    starts: tuple[int, ...]
    """First position of each document, then the length of the sequence."""
    owned: tuple[tuple[int, ...], ...]
    """Indices of the pieces of each rank, in order."""

    @property
    def piece(self) -> int:
        """Length of a piece."""
        return self.starts[-1] // sum(map(len, self.owned))

    def before(self, position: int, rank: int) -> int:
        """Return the number of positions of `rank` before one of the sequence."""
        counts = (position - index * self.piece for index in self.owned[rank])
        return sum(min(max(count, 0), self.piece) for count in counts)

    def positions(self, rank: int) -> Tensor:
        """Return the positions that `rank` owns (S,), in order."""
        pieces = torch.arange(self.starts[-1]).view(-1, self.piece)
        return pieces[list(self.owned[rank])].flatten()


@lru_cache(256)
def _row(cut: Cut, starts: tuple[int, ...], window: int) -> SplitRow:
    """Assign the pieces of a row to ranks."""
    length, size = starts[-1], cut.size
    if size == 1 or cut.balancing != "documents":
        return SplitRow(starts, tuple(map(cut.owned, range(size))))
    possible = (n for n in range(MOST_PIECES, 2, -1) if length % (n * size) == 0)
    each = next((n for n in possible if length // (n * size) >= MIN_PIECE), 2)
    assert length % (each * size) == 0, f"{length} not in {each * size} pieces"
    costs = work(starts, window).view(each * size, -1).sum(1).tolist()
    owned: list[list[int]] = [[] for _ in range(size)]
    load = [0] * size
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = min((r for r in range(size) if len(owned[r]) < each), key=load.__getitem__)
        owned[rank].append(index)
        load[rank] += costs[index]
    return SplitRow(starts, tuple(tuple(sorted(pieces)) for pieces in owned))


def work(starts: Sequence[int], window: int) -> Tensor:
    """Return the number of keys that each query of a row attends to: (whole sequence,)."""
    bounds = torch.tensor(starts)
    keys = torch.arange(1, starts[-1] + 1) - bounds[:-1].repeat_interleave(bounds.diff())
    return keys.clamp(max=window) if window else keys


@lru_cache(1024)
def segments(
    rows: tuple[SplitRow, ...], rank: int, owner: int, window: int
) -> tuple[tuple[Segment, ...], ...]:
    """Return the segments of queries of `rank` and keys of `owner`, in their local positions.

    Returns:
        Groups of segments, in each of which a query is in at most one.
    """
    groups: dict[int, list[Segment]] = {}
    for number, row in enumerate(rows):
        found = _earlier(number, row, rank, owner, window)
        if rank == owner:
            found = itertools.chain(_own(number, row, rank, window), found)
        for group, segment in found:
            groups.setdefault(group, []).append(segment)
    return tuple(tuple(groups[group]) for group in sorted(groups))


def _own(number: int, row: SplitRow, rank: int, window: int) -> Iterator[tuple[int, Segment]]:
    """Yield the causal segments of a rank's documents; with a window, within each piece."""
    pieces = [(index * row.piece, (index + 1) * row.piece) for index in row.owned[rank]]
    for first, last in pieces if window else [(0, row.starts[-1])]:
        for start, stop in itertools.pairwise(row.starts):
            if start < last and first < stop:
                place = row.before(max(first, start), rank), row.before(min(last, stop), rank)
                if place[0] < place[1]:
                    yield 0, Segment(number, place, place, 0, window)


def _earlier(
    number: int, row: SplitRow, rank: int, owner: int, window: int
) -> Iterator[tuple[int, Segment]]:
    """Yield the segments of each piece of `rank` and the earlier pieces of `owner`.

    A piece attends to these with one document, the one that it starts with. It sees all keys, so
    those of several pieces are one rectangle, unless a window hides some: then, each of the up to
    two pieces whose keys are hidden from some queries is a segment of its own.
    """
    if rank == owner and not window:
        return  # in the causal segments
    for index in row.owned[rank]:
        first = index * row.piece
        document = bisect_right(row.starts, first) - 1
        start, last = row.starts[document], min(row.starts[document + 1], first + row.piece)
        queries = row.before(first, rank), row.before(last, rank)
        seen = start
        if window and last - window > start:  # by all queries
            seen = min(-(-(last - window) // row.piece) * row.piece, first)
        keys = row.before(seen, owner), row.before(first, owner)
        if keys[0] < keys[1]:
            yield 1, Segment(number, queries, keys, keys[1] - queries[0])
        group = 2
        for other in row.owned[owner]:
            begin, end = max(start, other * row.piece), min((other + 1) * row.piece, seen)
            if begin < end:
                keys = row.before(begin, owner), row.before(end, owner)
                shift = (first - queries[0]) - (begin - keys[0])
                found = Segment(number, queries, keys, shift, window).trimmed()
                if found.queries[0] < found.queries[1] and found.keys[0] < found.keys[1]:
                    yield group, found
                    group += 1


Owned = Iterator[tuple[int, Tensor]]
"""Pairs of a rank and its keys and values, or their gradient: (2, B, K, S, E)."""


class _Exchange:
    """Asynchronous send to the next rank of the ring and receive from the previous one."""

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self.sent = tensor  # kept alive until it is sent
        self.received = torch.empty_like(tensor)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self.received, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _gather(kv: Tensor, group: ProcessGroup) -> Owned:
    """Yield every rank's keys and values, gathered at once; this rank's first."""
    rank, size = group.rank(), group.size()
    whole = all_gather(kv, group)
    for step in range(size):
        owner = (rank - step) % size
        yield owner, whole[owner]


def _scatter(gradients: Owned, group: ProcessGroup) -> Tensor:
    """Return the gradient of this rank's keys and values, summed over all ranks at once."""
    whole: Tensor | None = None
    for owner, gradient in gradients:
        if whole is None:
            whole = gradient.new_empty(group.size(), *gradient.shape)
        whole[owner] = gradient
    assert whole is not None
    return reduce_scatter(whole, group)


def _circulate(kv: Tensor, group: ProcessGroup) -> Owned:
    """Yield every rank's keys and values, this rank's first, while the next are received."""
    rank, size = group.rank(), group.size()
    for step in range(size):
        arriving = _Exchange(kv, group) if step < size - 1 else None
        yield (rank - step) % size, kv
        if arriving is not None:
            kv = arriving.wait()


def _return(gradients: Owned, group: ProcessGroup) -> Tensor:
    """Return the gradient of this rank's keys and values, accumulated around the ring.

    It follows them one step behind: each rank adds its share and sends it on, the last to the
    owner, which adds its own share.
    """
    _, own = next(gradients)
    arriving: _Exchange | None = None
    for _, gradient in gradients:
        if arriving is not None:
            gradient += arriving.wait()
        arriving = _Exchange(gradient, group)
    assert arriving is not None, "a ring has at least two ranks"
    return own + arriving.wait()


# Pairs of functions: fetch keys and values, return their gradients.
ROTATIONS = {"allgather": (_gather, _scatter), "ring": (_circulate, _return)}
