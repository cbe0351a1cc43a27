"""Low-rank projections of the gradients of matrices that are sharded over many ranks.

A matrix is written here so that its rows are kept and its columns are projected: A is the gradient,
(kept, size), or its transpose. With a basis Q, (size, rank), of orthonormal columns, the moments
are those of A Q, and N Qᵀ projects an update N of that shape back.

Ranks that split the rows of A have their rows of A Q. Ranks that split its columns each have a term
of all of A Q: these are summed and scattered by rows, so that moments stay sharded as far as the
matrix is, and updates are gathered before they are projected back. A rank keeps the rows of the
basis that belong to its columns of A.

The basis are the leading right singular vectors of A, of which no rank ever holds more than its
share: columns become rows by an all-to-all, and then only sums over rows remain, of AᵀA for the
exact vectors, or of A's products with a few columns (Halko et al., 2011, arXiv:0909.4061). They are
computed in float64, so that every layout finds the same, unless `Method.dtype` is another; one rank
finishes each matrix, fixes the signs, and broadcasts it, so that all have the same bits.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed import ProcessGroup

from torchtitan.optim.parameters import NamedParameter, local
from torchtitan.research.common.draws import normal
from torchtitan.torch_private.distributed import all_gather, columns_to_rows, reduce_scatter
from torchtitan.torch_private.dtensor import (
    is_dtensor,
    local_extent,
    placed,
    shard_rows,
    split_dim,
    splits_within,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

NOISE = 1e-6
"""Fraction of the largest singular value below which vectors are rounding noise of float32."""


class Method(NamedTuple):
    """Method of computing the leading singular vectors."""

    exact: bool = True
    power_iterations: int = 1
    oversampling: int = 8
    dtype: torch.dtype = torch.float64
    """Dtype of the products of A and few columns."""


class Scatter(NamedTuple):
    """Step that scatters rows of A Q among the ranks that have terms of them."""

    group: ProcessGroup
    rows: int
    """Number of rows before the step."""
    is_sum: bool
    """Whether all ranks keep all rows instead, since they are not evenly divisible."""

    @property
    def share(self) -> int:
        """Number of rows of each rank but the last."""
        return -(-self.rows // self.group.size())

    @property
    def own(self) -> int:
        """Number of rows of this rank after the step."""
        if self.is_sum:
            return self.rows
        return max(min(self.share, self.rows - self.share * self.group.rank()), 0)

    def apply(self, terms: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks."""
        if self.is_sum:
            dist.all_reduce(terms, group=self.group)
            return terms
        padded = terms.new_zeros(self.group.size() * self.share, *terms.shape[1:])
        padded[: self.rows] = terms
        parts = padded.view(self.group.size(), self.share, *terms.shape[1:])
        return reduce_scatter(parts, self.group)[: self.own]

    def undo(self, own: Tensor) -> Tensor:
        """Gather all rows from the ranks."""
        if self.is_sum:
            return own
        padded = own.new_zeros(self.share, *own.shape[1:])
        padded[: self.own] = own
        return all_gather(padded, self.group).flatten(0, 1)[: self.rows]


class Split(NamedTuple):
    """Axis of a mesh that splits the columns of A."""

    group: ProcessGroup
    widths: Sequence[int]
    """Number of columns of each rank."""


class Projection:
    """Projection of one matrix, and this rank's part of it."""

    def __init__(self, parameter: NamedParameter, rank: int, projected: int) -> None:
        """`projected` is the dim that becomes `rank`: 1 for columns, 0 for rows."""
        self.parameter, self.rank, self.projected = parameter, rank, projected
        kept = 1 - projected
        self.state_shape = Size((parameter.shape[kept], rank))
        """Shape of each moment."""
        self.basis_shape = Size((parameter.shape[projected], rank))
        extent, offset = tuple(parameter.shape), (0, 0)
        if is_dtensor(parameter.tensor):
            extent, offset = local_extent(parameter.tensor)  # type: ignore[assignment]
        self.columns = slice(offset[projected], offset[projected] + extent[projected])
        """Columns of A on this rank."""
        self.groups: list[ProcessGroup] = []
        """Groups of all axes of the mesh."""
        self.sharded: list[ProcessGroup] = []
        """Groups of the axes that split the matrix."""
        self.splitting: list[Split] = []
        """Axes that split columns of A, starting with the smallest split."""
        self.scatters: list[Scatter] = []
        self.state_placements: list[Placement] = []
        self.basis_placements: list[Placement] = []
        self.rows = extent[kept]
        """Number of rows of a moment on this rank."""
        if parameter.mesh is not None:
            self._place()

    def _place(self) -> None:
        """Process the axes of the mesh: rows of A are split first, then those of A Q again."""
        from torch.distributed.tensor import Replicate

        mesh, placements, columns = self.parameter.mesh, self.parameter.placements, list[int]()
        assert mesh is not None
        kept = 1 - self.projected
        for axis, placement in enumerate(placements):
            group, dim = mesh.get_group(axis), split_dim(placement)
            self.groups.append(group)
            if dim is not None:
                self.sharded.append(group)
            state: Placement = Replicate()
            basis: Placement = Replicate()
            if dim == kept:
                state = shard_rows(splits_within(placement))
            elif dim == self.projected:
                columns.append(axis)
                basis = shard_rows(splits_within(placement))
                later = range(axis + 1, mesh.ndim)
                parts = math.prod(mesh.size(n) for n in later if split_dim(placements[n]) == kept)
                is_uneven = bool(self.state_shape[0] % (parts * group.size()))
                scatter = Scatter(group, self.rows, is_sum=parts > 1 and is_uneven)
                self.scatters.append(scatter)
                self.rows = scatter.own
                if not scatter.is_sum:
                    state = shard_rows(parts)
            self.state_placements.append(state)
            self.basis_placements.append(basis)
        whole = self.basis_shape[0]
        # What is split within the parts of another axis is split after it.
        for axis in sorted(columns, key=lambda axis: splits_within(placements[axis]) > 1):
            group, share = self.groups[axis], -(-whole // mesh.size(axis))
            widths = [max(min(share, whole - n * share), 0) for n in range(mesh.size(axis))]
            self.splitting.insert(0, Split(group, widths))
            whole = widths[group.rank()]

    def state(self, part: Tensor) -> Tensor:
        """Return the distributed tensor of a moment, given this rank's part (rows, rank)."""
        return self._placed(part, self.state_placements, self.state_shape)

    def basis(self, part: Tensor) -> Tensor:
        """Return the distributed tensor of a basis, given this rank's rows."""
        return self._placed(part, self.basis_placements, self.basis_shape)

    def _placed(self, part: Tensor, placements: "Sequence[Placement]", shape: Size) -> Tensor:
        mesh = self.parameter.mesh
        return part if mesh is None else placed(part, mesh, placements, shape)

    def oriented(self, part: Tensor) -> Tensor:
        """Return this rank's part of A, given that of the gradient, or vice versa."""
        return part if self.projected == 1 else part.T

    def down(self, gradient: Tensor, basis: Tensor) -> Tensor:
        """Return A Q (rows, rank), at least in float32, from this rank's parts of both.

        The product is computed in the dtype of the basis.
        """
        low = self.oriented(gradient).to(basis.dtype) @ basis
        low = low.to(torch.promote_types(low.dtype, torch.float32))
        for scatter in self.scatters:
            low = scatter.apply(low)
        return low

    def up(self, low: Tensor, basis: Tensor) -> Tensor:
        """Return N Qᵀ as this rank's part of the matrix: `low` is (rows, rank)."""
        for scatter in reversed(self.scatters):
            low = scatter.undo(low)
        return self.oriented(low.to(basis.dtype) @ basis.T)

    def turned(self, old: Tensor, new: Tensor) -> Tensor:
        """Return the change of basis (rank, rank), from this rank's parts of both bases."""
        turn = old.T @ new
        for split in self.splitting:
            dist.all_reduce(turn, group=split.group)
        return turn


def find_bases(
    projections: Sequence[Projection], seeds: Sequence[str], method: Method
) -> Iterator[Tensor]:
    """Compute new bases for the current gradients: yield this rank's rows of each, in float32.

    Ranks take turns in finishing the matrices: as many at once as there are ranks.

    Args:
        seeds: seeds of the random columns of each.
    """
    ranks = max((math.prod(g.size() for g in each.groups) for each in projections), default=1)
    for first in range(0, len(projections), ranks):
        turn = dict(enumerate(projections[first : first + ranks], first))
        mine: dict[int, Reduced] = {}
        for number, projection in turn.items():
            reduced = _reduced(projection, seeds[number], method)
            places = zip(projection.groups, _place_of(projection, number), strict=True)
            if all(group.rank() == place for group, place in places):
                mine[number] = reduced
        finished = {number: mine[number].basis(turn[number].rank) for number in mine}
        for number, projection in turn.items():
            whole = _sent(projection, number, finished.get(number))
            yield whole[projection.columns].clone()


class Reduced(NamedTuple):
    """Sums over the rows of A from which the basis follows."""

    product: Tensor
    """Product AᵀA, or AᵀY with Y = A Z: (size, size or columns of Z)."""
    gram: Tensor | None = None
    """Gram matrix YᵀY."""

    def basis(self, rank: int) -> Tensor:
        """Return the leading right singular vectors: (size, rank)."""
        if self.gram is None:
            squares, vectors = torch.linalg.eigh(self.product)
            vectors, values = vectors.flip(1), squares.flip(0).clamp(min=0).sqrt()
        else:
            # With Y = Q T⁻¹, Q orthonormal, the singular vectors of QᵀA = (AᵀY T)ᵀ, of which
            # another QR leaves a small matrix. Where vectors are few, eigh is much faster than svd.
            squares, axes = torch.linalg.eigh(self.gram)
            is_seen = squares > squares.max() * NOISE**2
            whitening = axes[:, is_seen] / squares[is_seen].sqrt()
            vectors, triangle = torch.linalg.qr(self.product @ whitening.to(self.product.dtype))
            squares, axes = torch.linalg.eigh(triangle.double() @ triangle.double().T)
            values = squares.flip(0).clamp(min=0).sqrt()
            vectors = vectors @ axes.flip(1).to(vectors.dtype)
        return complete(vectors[:, values > values[:1] * NOISE], rank)


def complete(vectors: Tensor, rank: int) -> Tensor:
    """Return the first `rank` orthonormal columns, with the largest component of each positive.

    If there are fewer, random ones follow, which depend only on the others.
    """
    size, found = vectors.shape
    if found < rank:
        generator = torch.Generator().manual_seed(0)
        more = torch.randn(size, rank - found, generator=generator, dtype=vectors.dtype)
        vectors = torch.linalg.qr(torch.cat([vectors, more.to(vectors.device)], dim=1)).Q
    vectors = vectors[:, :rank]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0)


def _reduced(projection: Projection, seed: str, method: Method) -> Reduced:
    gradient = projection.parameter.tensor.grad
    assert gradient is not None
    size, columns = projection.basis_shape[0], projection.rank + method.oversampling
    is_exact = method.exact or columns >= size
    rows = projection.oriented(local(gradient)).to(torch.float64 if is_exact else method.dtype)
    for split in projection.splitting:
        rows = columns_to_rows(rows, split.group, split.widths)
    if is_exact:
        return Reduced(_summed(rows.T @ rows, projection))
    some = normal(size, columns, seed, rows.device).to(rows)
    for _ in range(method.power_iterations):
        some = torch.linalg.qr(_summed(rows.T @ (rows @ some), projection)).Q
    seen = rows @ some
    gram = _summed(seen.double().T @ seen.double(), projection)
    return Reduced(_summed(rows.T @ seen, projection), gram)


def _summed(terms: Tensor, projection: Projection) -> Tensor:
    for group in projection.sharded:
        dist.all_reduce(terms, group=group)
    return terms


def _place_of(projection: Projection, number: int) -> list[int]:
    """Return the coordinates on the mesh of the rank that finishes a matrix."""
    places = []
    for group in reversed(projection.groups):
        number, place = divmod(number, group.size())
        places.append(place)
    return places[::-1]


def _sent(projection: Projection, number: int, basis: Tensor | None) -> Tensor:
    """Broadcast the whole basis from its owner."""
    parameter = projection.parameter.tensor
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    if basis is None:
        basis = torch.empty(projection.basis_shape, device=local(parameter).device)
    whole = basis.to(dtype).contiguous()
    # An axis may send a wrong value before the right one arrives, which the next axis overwrites.
    for group, place in zip(projection.groups, _place_of(projection, number), strict=True):
        dist.broadcast(whole, group=group, group_src=place)
    return whole
