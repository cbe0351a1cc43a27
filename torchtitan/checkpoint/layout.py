"""The rank that writes a block of a tensor, and so the file that has it, by arithmetic.

A tensor is cut along some axes of its mesh, and copied along the others. Both are regular, so the
place of every block follows from a few numbers (`Placement`), which are the same on all ranks that
hold the tensor. Ranks that hold the same tensors in the same way are a group; a manifest has the
items of each group, and nothing for each block.

Of the copies of a block one rank writes it, on disks of nodes one of each node. Large items take
turns, by their bytes, so that copies share the work.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.checkpoint.placement import Nodes
from torchtitan.checkpoint.ranges import Piece, Sizes, StoredBlock
from torchtitan.digest import signed, unsigned
from torchtitan.parallel import World
from torchtitan.torch_private.dtensor import (
    detached_part,
    is_dtensor,
    local_extent,
    order_of_cuts,
    ranks_of,
)

WRITERS = 8
"""Maximum number of copies of a block that take turns: a rank reads files of no more."""
SMALL = 2**16
"""Bytes of a tensor below which its first copy is written, so that small ones are in one file."""
OWN = re.compile(r"(rng|communication)\.(\d+)\.(.+)")
"""Names of tensors that each rank has for itself."""
Ranges = tuple[range, ...]


class Placement(NamedTuple):
    """Regular distribution of a tensor over ranks."""

    first: int
    """Rank of the first block and copy."""
    cuts: tuple[tuple[int, int, int], ...] = ()
    """Dim, number of parts and distance of their ranks, in the order in which parts are cut."""
    copies: tuple[tuple[int, int], ...] = ()
    """Number of copies and distance of their ranks."""

    def blocks(self, shape: Sizes, wanted: Ranges) -> list[tuple[Ranges, int]]:
        """Return the blocks that overlap `wanted`, and the rank of the first copy of each."""
        found = [(tuple(map(range, shape)), self.first)] if all(wanted) else []
        for dim, parts, distance in self.cuts:
            uncut, found = found, []
            for block, rank in uncut:
                whole, want = block[dim], wanted[dim]
                size = -(-len(whole) // parts) or 1
                begin = max(want.start - whole.start, 0) // size
                end = -(-(min(want.stop, whole.stop) - whole.start) // size)
                for part in range(begin, end):
                    piece = whole[part * size : (part + 1) * size]
                    ranges = (*block[:dim], piece, *block[dim + 1 :])
                    found.append((ranges, rank + part * distance))
        return found

    def holders(self, first: int) -> Iterator[int]:
        """Yield the ranks of all copies of a block, given that of its first."""
        steps = [range(0, count * distance, distance) for count, distance in self.copies]
        return (first + sum(each) for each in product(*steps))


class PlacedTensor(NamedTuple):
    """Tensor of a group of ranks."""

    dtype: torch.dtype
    shape: Sizes
    placement: Placement | None
    """None: every rank of the group holds all of it."""


class RankGroup:
    """Ranks that hold the same tensors in the same way; `*` is the rank in the name of its own."""

    def __init__(self, ranks: Sequence[int], items: Mapping[str, PlacedTensor]) -> None:
        self.ranks, self.items = ranks, items
        self._members = frozenset(ranks)

    @cached_property
    def turns(self) -> dict[str, int]:
        """Number, by name, of the copy that writes a tensor."""
        written: dict[Any, list[int]] = {}
        turns: dict[str, int] = {}
        for name, item in self.items.items():
            placed = item.placement
            count = math.prod(n for n, _ in placed.copies) if placed else len(self.ranks)
            loads = written.setdefault(placed and placed.copies, [0] * min(count, WRITERS))
            size = math.prod(item.shape) * item.dtype.itemsize
            turns[name] = loads.index(min(loads)) if size >= SMALL else 0
            loads[turns[name]] += size
        return turns

    def holders(self, name: str, first: int) -> Iterator[int]:
        """Yield the ranks of this group that hold a block, given that of its first copy."""
        placement = self.items[name].placement
        if placement is None:
            return iter(self.ranks)
        return (rank for rank in placement.holders(first) if rank in self._members)

    def writer(self, name: str, first: int, here: Collection[int] | None) -> int | None:
        """Return the rank that writes a block; None if no rank of it among `here` holds it."""
        found = (rank for rank in self.holders(name, first) if here is None or rank in here)
        holders = list(islice(found, WRITERS))  # of thousands of copies
        return holders[self.turns[name] % len(holders)] if holders else None

    def find(
        self,
        name: str,
        wanted: Ranges,
        here: Collection[int] | None,
        others: Sequence["RankGroup"] = (),
    ) -> list[StoredBlock[int]] | None:
        """Return the blocks that overlap `wanted`, and the ranks whose files have them.

        Returns None if files of `here` lack any of it. Of `others`, all groups, some may share it.
        """
        groups, found = sharing(others, name, self.items[name]) or [self], []
        _, shape, placement = self.items[name]
        whole = placement or Placement(self.ranks[0])
        for block, first in whole.blocks(shape, wanted):
            writer = writer_among(groups, name, first, here)
            if writer is None:
                return None
            offsets, sizes = tuple(r.start for r in block), tuple(map(len, block))
            found.append(StoredBlock(offsets, sizes, writer))
        return found

    def to_json(self, placements: list[Placement], digests: Mapping[str, Any]) -> dict[str, Any]:
        """Return the group in a manifest, adding to the `placements` that it names by number."""
        numbers: dict[Placement | None, int | None] = {None: None}
        numbers |= {placement: number for number, placement in enumerate(placements)}
        items = {}
        for name, (dtype, shape, placement) in self.items.items():
            digest = digests.get(name)
            if isinstance(digest, Mapping):
                digest = [f"{digest[rank]:016x}" for rank in self.ranks]
            elif digest is not None:
                digest = f"{digest:016x}"
            if placement is not None and placement not in numbers:
                numbers[placement] = len(placements)
                placements.append(placement)
            kind = str(dtype).removeprefix("torch.")
            items[name] = [kind, shape, numbers[placement], digest]
        return {"ranks": ranges_of(self.ranks), "items": items}


def sharing(groups: Sequence[RankGroup], name: str, item: PlacedTensor) -> list[RankGroup]:
    """Return the groups that hold the same tensor in the same way."""
    return [group for group in groups if group.items.get(name) == item]


def writer_among(
    groups: Sequence[RankGroup], name: str, first: int, here: Collection[int] | None
) -> int | None:
    """Return the rank that writes a block: in the first of these groups that holds it `here`."""
    writers = (group.writer(name, first, here) for group in groups)
    return next((rank for rank in writers if rank is not None), None)


def ranges_of(ranks: Sequence[int]) -> list[list[int]]:
    """Return increasing numbers as ranges: begin, end and step of each."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and len(range(*found[-1])) == 1:
            found[-1] = [found[-1][0], rank + 1, rank - found[-1][0]]
        elif found and rank == range(*found[-1])[-1] + found[-1][2]:
            found[-1][1] = rank + 1
        else:
            found.append([rank, rank + 1, 1])
    return found


def read_groups(
    content: Sequence[Mapping[str, Any]], placements: Sequence[Any]
) -> tuple[list[RankGroup], dict[str, int]]:
    """Return the groups of a manifest, and the digest of each of their tensors."""
    known = [
        Placement(first, tuple(map(tuple, cuts)), tuple(map(tuple, copies)))
        for first, cuts, copies in placements
    ]
    groups, digests = [], dict[str, int]()
    for each in content:
        items = {}
        ranks = [rank for begin, end, step in each["ranks"] for rank in range(begin, end, step)]
        for key, (kind, shape, number, digest) in each["items"].items():
            placement = None if number is None else known[number]
            items[key] = PlacedTensor(getattr(torch, kind), tuple(shape), placement)
            names = names_of(key, ranks)
            parts = [digest] if names == [key] else digest
            digests |= {n: int(part, 16) for n, part in zip(names, parts, strict=True)}
        groups.append(RankGroup(ranks, items))
    return groups, digests


# --- of this rank ---


def distances_of(mesh: DeviceMesh) -> tuple[int, list[int]]:
    """Return the first rank of a mesh, and the distance between ranks along each axis."""
    ranks = ranks_of(mesh)
    neighbors = (ranks.take(int(size > 1), axis) for axis, size in enumerate(ranks.shape))
    first = int(ranks.flat[0])
    distances = [int(each.flat[0]) - first for each in neighbors]
    regular = first + np.tensordot(distances, np.indices(ranks.shape), 1)
    assert (ranks == regular).all(), f"irregular mesh: {mesh}"
    return first, distances


def own_name(name: str, rank: int) -> str:
    """Return the name of an item, in which `*` stands for the rank that has it for itself."""
    found = OWN.fullmatch(name)
    return f"{found[1]}.*.{found[3]}" if found and int(found[2]) == rank else name


def names_of(key: str, ranks: Sequence[int]) -> list[str]:
    """Return the names of the tensors of an item."""
    return [key.replace("*", str(rank), 1) for rank in ranks] if "*" in key else [key]


def items_of(tensors: Mapping[str, Tensor], rank: int) -> dict[str, PlacedTensor]:
    """Return what a rank holds."""
    meshes: dict[DeviceMesh, tuple[int, list[int]]] = {}
    items = {}
    for name, tensor in tensors.items():
        placement = None
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            if mesh not in meshes:
                meshes[mesh] = distances_of(mesh)
            (first, distances), sizes, cuts = meshes[mesh], mesh.shape, order_of_cuts(tensor)
            copied = sorted(set(range(len(sizes))) - {axis for axis, _ in cuts})
            placement = Placement(
                first,
                tuple((dim, sizes[axis], distances[axis]) for axis, dim in cuts),
                tuple((sizes[axis], distances[axis]) for axis in copied if sizes[axis] > 1),
            )
        items[own_name(name, rank)] = PlacedTensor(tensor.dtype, tuple(tensor.shape), placement)
    return items


def hash_of(items: Mapping[str, PlacedTensor]) -> bytes:
    """Return what is the same for ranks that hold the same tensors in the same way."""
    text = json.dumps([(name, str(item)) for name, item in items.items()])
    return xxhash.xxh3_128_digest(text.encode())


def agree_on_groups(world: World, own: Mapping[str, PlacedTensor]) -> list[RankGroup]:
    """Return the groups of all ranks; each rank sends a hash, and one of each group its items."""
    hashes = world.gather_object(hash_of(own))
    members: dict[bytes, list[int]] = {}
    for rank, each in enumerate(hashes or ()):
        members.setdefault(each, []).append(rank)
    leaders = world.broadcast_object([ranks[0] for ranks in members.values()])
    found = world.gather_object(own if world.rank in leaders else None) or ()
    return [
        RankGroup(ranks, items)
        for ranks, items in world.broadcast_object(
            [(ranks, found[ranks[0]]) for ranks in members.values()]
        )
    ]


class PlannedPiece(NamedTuple):
    """Block that this rank writes."""

    key: str
    """Name of its item."""
    piece: Piece
    counts: bool
    """Whether it is in the digest of its tensor, which other nodes may have written too."""


class WritePlan:
    """Groups of a kind of save, and the blocks that this rank writes."""

    def __init__(self, nodes: Nodes, tensors: Mapping[str, Tensor]) -> None:
        """Agree on the groups with all ranks, which call it together."""
        self.rank = rank = nodes.world.rank
        self.here = None if len(nodes.ranks) == 1 else frozenset(nodes.here)
        self.groups = agree_on_groups(nodes.world, items_of(tensors, rank))
        self.owners: dict[str, RankGroup] = {}
        """First group that has a tensor, by the name of its item."""
        for group in self.groups:
            for key in group.items:
                self.owners.setdefault(key, group)
        self.mine = next(group for group in self.groups if rank in group.ranks)
        chosen = (self._chosen(name, tensor) for name, tensor in tensors.items())
        self.chosen = list(filter(None, chosen))

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[tuple[Piece, Tensor]]:
        """Return the blocks that this rank writes."""
        return [(each.piece, detached_part(tensors[each.piece.name])) for each in self.chosen]

    def _chosen(self, name: str, tensor: Tensor) -> PlannedPiece | None:
        key = own_name(name, self.rank)
        shape = tuple(tensor.shape)
        sizes, offsets = local_extent(tensor) if is_dtensor(tensor) else (shape, (0,) * len(shape))
        found = tuple(detached_part(tensor).shape)
        assert found == sizes, f"{name}: this rank has {found}, and {sizes} by its mesh"
        piece, owner = Piece(name, tensor.dtype, shape, offsets, sizes), self.owners[key]
        if key != name:
            return PlannedPiece(key, piece, True)
        is_empty = math.prod(shape) > 0 == math.prod(sizes)
        item = self.mine.items[key]
        is_owned = owner.items[key] == item
        if is_empty or (self.here is None and not is_owned):
            return None
        first, groups = self.mine.ranks[0], sharing(self.groups, key, item)
        if placed := item.placement:  # this rank, at 0 on the axes of copies
            at = self.rank - placed.first
            first = self.rank - sum(at // step % count * step for count, step in placed.copies)
        if writer_among(groups, key, first, self.here) != self.rank:
            return None
        counted = next(rank for group in groups for rank in group.holders(key, first))
        return PlannedPiece(key, piece, is_owned and (self.here is None or counted in self.here))

    # --- digests ---

    @property
    def _shared(self) -> list[str]:
        return [key for key in self.owners if "*" not in key]

    def sum_digests(self, written: Mapping[str, int]) -> Tensor:
        """Return this rank's part of the digest of each tensor, in the order of the groups."""
        parts = {each.key: written[each.piece.name] for each in self.chosen if each.counts}
        return torch.tensor([signed(parts.get(key, 0)) for key in self._shared], dtype=torch.int64)

    def own_digests(self, written: Mapping[str, int]) -> dict[str, int]:
        """Return the digests of the tensors that this rank has for itself."""
        return {c.key: written[c.piece.name] for c in self.chosen if c.key != c.piece.name}

    def digests(self, sums: Tensor, own: Sequence[Mapping[str, int]]) -> dict[str, Any]:
        """Return the digests of all items, of `*` by rank; `own`: `own_digests` of all ranks."""
        found: dict[str, Any] = dict(zip(self._shared, map(unsigned, sums.tolist()), strict=True))
        for group in self.groups:
            for key in (key for key in group.items if "*" in key):
                found.setdefault(key, {})
                found[key] |= {rank: own[rank][key] for rank in group.ranks}
        return found
