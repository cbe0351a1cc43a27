"""Ring of ranks around which parts of weights rotate; each rank computes with one after another.

Rank r starts with its own part and sends it to r + 1, so that after k hops it has that of r - k. In
the backward the parts rotate in the other direction, together with their gradients:

    forward, hop k          computes with the part of r - k, then passes it on to r + 1
    backward, k = W-1 ... 0 has the part of r - k again, adds its own share to the part's gradient,
                            and passes both on to r - 1; the last is its own part and gradient

So W - 1 hops of the weights in the forward, and of weights and gradients in the backward.

A rank keeps its own part and sends copies, so a forward without a backward, as in evaluation, or a
second one, as in recomputation, leaves every rank with what it owns. An operation with a part saves
only the input: in the backward it fetches the part that has arrived. So autograd never keeps a
weight, and recomputation of activations works as with any other module.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from torchtitan.losses import chunked_gradients, chunked_statistics
from torchtitan.parallel.settings import Precision


class Transfer(NamedTuple):
    """Asynchronous receive of parts from one neighbour while sending to the other."""

    arriving: list[Tensor]
    works: list[Work]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        self.works.clear()  # they keep the sent tensors alive
        return self.arriving


class Neighbours:
    """Ring, as seen by one rank."""

    def __init__(self, group: ProcessGroup, in_place: bool, piece: int) -> None:
        """
        Args:
            in_place: whether received parts replace the sent ones, `piece` bytes at a time, without
                overlap; otherwise they have their own buffer and arrive during computation.
        """
        self.group, self.in_place, self.piece = group, in_place, piece
        self.size, self.rank = group.size(), group.rank()

    def pass_on(self, sent: Sequence[Tensor], step: int) -> Transfer:
        """Start sending tensors to the rank `step` further on, receiving from the other side."""
        to, of = (
            dist.get_global_rank(self.group, (self.rank + n) % self.size) for n in (step, -step)
        )
        arriving = [torch.empty_like(tensor) for tensor in sent]
        operations = [dist.P2POp(dist.isend, tensor, to, self.group) for tensor in sent]
        operations += [dist.P2POp(dist.irecv, tensor, of, self.group) for tensor in arriving]
        return Transfer(arriving, dist.batch_isend_irecv(operations))

    def replace(self, tensors: Sequence[Tensor], step: int) -> None:
        """Send tensors on, and replace them by those received from the other side."""
        for tensor in tensors:
            for piece in torch.split(tensor.view(-1), self.piece // tensor.itemsize):
                piece.copy_(self.pass_on([piece], step).wait()[0])


class RotatingParts:
    """Parts that rotate together, for one forward and its backward."""

    def __init__(
        self,
        own: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        ring: Neighbours,
        precision: Precision,
    ) -> None:
        """
        Args:
            own: this rank's parts.
            shapes: their padded shapes, equal on all ranks.
            precision: dtypes in which parts and gradients are sent.
        """
        self.own, self.shapes, self.ring, self.precision = own, shapes, ring, precision
        self.hop = 0
        self.current: list[Tensor] = []
        """Parts currently on this rank."""
        self.pending: Transfer | None = None
        self.gradients: list[Tensor] = []
        """Gradients of the current parts, summed over the previous ranks and this one."""
        self.pending_gradients: Transfer | None = None

    @property
    def owner(self) -> int:
        """Owner of the current parts."""
        return (self.ring.rank - self.hop) % self.ring.size

    @property
    def is_last(self) -> bool:
        return self.hop == self.ring.size - 1

    def start_forward(self) -> None:
        """Start the forward."""
        self.current = self._own(moves=self.ring.size > 1)
        self._overlap(1, not self.is_last)

    def end_forward_hop(self) -> None:
        """Complete a hop of the forward."""
        if self.is_last:
            self.current = []
            return
        self._move(1)
        self.hop += 1
        self._overlap(1, not self.is_last)

    def fetch(self) -> list[Tensor]:
        """Return the current parts in the backward, in which they are received only on demand."""
        if not self.current:
            assert self.is_last, "parts are asked for at every hop or at none"
            self.current = self._own(moves=self.hop > 0)
            # The way back begins where the forward ended, one rank away.
            self._overlap(-1, self.hop > 0)
            if self.hop:
                self._move(-1)
            self._overlap(-1, self.hop > 1)
        return self.current

    def add(self, index: int, gradient: Tensor) -> None:
        """Add this rank's share of the gradient of a current part."""
        if not self.gradients:
            self.gradients = [
                torch.zeros(shape, dtype=self.precision.reduce, device=gradient.device)
                for shape in self.shapes
            ]
        self.gradients[index] += gradient

    def end_backward_hop(self) -> None:
        """Complete a hop of the backward: gradients include this rank's share."""
        if self.ring.in_place:
            self.ring.replace(self.gradients, -1)
        else:
            self._merge()
            self.pending_gradients = self.ring.pass_on(self.gradients, -1)
            self.gradients = []
        self.hop -= 1
        if self.current and self.hop:
            self._move(-1)
            self._overlap(-1, self.hop > 1)
        elif self.current:
            self.current.clear()
            self.current = self._own(moves=False)

    def own_gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's own parts, summed over all ranks."""
        self._merge()
        self.current = []
        return [
            gradient[tuple(slice(size) for size in own.shape)].to(own.dtype)
            for gradient, own in zip(self.gradients, self.own, strict=True)
        ]

    def _merge(self) -> None:
        """Add the gradients received from previous ranks."""
        if self.pending_gradients:
            for mine, theirs in zip(self.gradients, self.pending_gradients.wait(), strict=True):
                mine += theirs
            self.pending_gradients = None

    def _own(self, moves: bool) -> list[Tensor]:
        """Return this rank's parts to compute with and, if `moves`, to send.

        They are copies if they are cast, padded, or would be replaced by received parts.
        """
        parts = []
        for own, shape in zip(self.own, self.shapes, strict=True):
            part = own.to(self.precision.compute)
            if part.shape != shape:
                pairs = zip(reversed(shape), reversed(part.shape), strict=True)
                part = F.pad(part, [end for n, m in pairs for end in (0, n - m)])
            is_replaced = moves and self.ring.in_place and part.data_ptr() == own.data_ptr()
            parts.append(part.clone() if is_replaced else part.contiguous())
        return parts

    def _overlap(self, step: int, is_needed: bool) -> None:
        """Send the current parts during the computation, if another hop needs them."""
        if is_needed and not self.ring.in_place:
            self.pending = self.ring.pass_on(self.current, step)

    def _move(self, step: int) -> None:
        """Take the parts that follow a hop."""
        if self.ring.in_place:
            self.ring.replace(self.current, step)
            return
        assert self.pending is not None
        self.current, self.pending = self.pending.wait(), None


class RingHop(NamedTuple):
    """One hop: operations with the current parts."""

    rotating: RotatingParts
    ticket: Tensor
    """Tensor (0-d) that makes autograd compute the gradients that `RotatingParts.add` sums."""

    @property
    def owner(self) -> int:
        """Owner of the current parts."""
        return self.rotating.owner

    def linear(self, x: Tensor, index: int = 0) -> Tensor:
        """Compute `F.linear(x, part)`: (..., inputs of the part) to (..., its outputs)."""
        out: Tensor = _Linear.apply(x, *self, index)  # type: ignore[no-untyped-call]
        return out

    def inputs(self, x: Tensor, index: int = 0) -> Tensor:
        """Return the slice of all inputs (..., inputs) for a part that is split by inputs."""
        size = self.rotating.shapes[index][-1]
        here = x[..., self.owner * size : (self.owner + 1) * size]
        return F.pad(here, (0, missing)) if (missing := size - here.shape[-1]) else here

    def embedding(self, tokens: Tensor, index: int = 0) -> Tensor:
        """Look up tokens (...) whose rows are in the current part, zeros for others: (..., D)."""
        rows = self.rotating.shapes[index][0]
        local = tokens - self.owner * rows
        out: Tensor = _Embedding.apply(local, *self, index)  # type: ignore[no-untyped-call]
        return out

    def statistics(
        self, hidden: Tensor, targets: Tensor, chunk: int, backend: str, rows: int
    ) -> tuple[Tensor, Tensor]:
        """Compute `chunked_statistics` (N,) of the first part's logits; all parts have `rows`
        together."""
        most = self.rotating.shapes[0][0]
        first = self.owner * most
        here = min(max(rows - first, 0), most)
        lse, of_target = _Statistics.apply(  # type: ignore[no-untyped-call]
            hidden, targets - first, *self, here, chunk, backend
        )
        return lse, of_target


def rotate(
    own: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    ring: Neighbours,
    precision: Precision,
    compute: Callable[[RingHop], tuple[Tensor, ...]],
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield the owner and the results of `compute` for the parts of each rank in turn.

    Args:
        own: this rank's parts.
        shapes: their padded shapes, equal on all ranks.
    """
    rotating = RotatingParts([part.detach() for part in own], shapes, ring, precision)
    ticket = _Start.apply(rotating, *own)  # type: ignore[no-untyped-call]
    rotating.start_forward()
    for hop in range(ring.size):
        owner, out = rotating.owner, compute(RingHop(rotating, ticket))
        rotating.end_forward_hop()
        if hop < ring.size - 1:
            ticket, *passed = _Hop.apply(rotating, ticket, *out)  # type: ignore[no-untyped-call]
            out = tuple(passed)
        yield owner, out


class _Start(torch.autograd.Function):
    """Start of the ring; its backward returns the accumulated gradients."""

    @staticmethod
    def forward(ctx: Any, rotating: RotatingParts, *own: Tensor) -> Tensor:
        ctx.rotating = rotating
        return own[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.rotating.own_gradients()


class _Hop(torch.autograd.Function):
    """Barrier between two hops. A hop's backward runs only after all of the next one's, because its
    results pass through here together with the inputs of the next one."""

    @staticmethod
    def forward(ctx: Any, rotating: RotatingParts, *passed: Tensor) -> tuple[Tensor, ...]:
        ctx.rotating = rotating
        return tuple(tensor.view_as(tensor) for tensor in passed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.rotating.end_backward_hop()
        return None, *gradients


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotating: RotatingParts, ticket: Tensor, index: int) -> Tensor:
        ctx.rotating, ctx.index = rotating, index
        ctx.save_for_backward(x)
        return F.linear(x, rotating.current[index])

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        # Before fetching: this may recompute, with a rotating of its own.
        (x,) = ctx.saved_tensors
        part = ctx.rotating.fetch()[ctx.index]
        ctx.rotating.add(ctx.index, of_out.flatten(0, -2).T @ x.flatten(0, -2))
        return of_out @ part if ctx.needs_input_grad[0] else None, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, rotating: RotatingParts, ticket: Tensor, index: int
    ) -> Tensor:
        part = rotating.current[index]
        is_here = (local >= 0) & (local < len(part))
        place = torch.where(is_here, local, 0)
        ctx.rotating, ctx.index = rotating, index
        ctx.save_for_backward(place, is_here)
        return F.embedding(place, part) * is_here[..., None]

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[None, ...]:
        place, is_here = ctx.saved_tensors
        rotating, index = ctx.rotating, ctx.index
        rows = (of_out * is_here[..., None]).flatten(0, -2).to(rotating.precision.reduce)
        gradient = torch.zeros(rotating.shapes[index], dtype=rows.dtype, device=rows.device)
        rotating.add(index, gradient.index_add_(0, place.flatten(), rows))
        return None, None, None, None


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        ctx.rotating, _, ctx.rows, *ctx.how = rest
        part = ctx.rotating.current[0][: ctx.rows]
        lse, of_target = chunked_statistics(hidden, part, targets, *ctx.how)
        ctx.save_for_backward(hidden, targets, lse)
        return lse, of_target

    @staticmethod
    def backward(ctx: Any, of_lse: Tensor, of_target: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, lse = ctx.saved_tensors
        part = ctx.rotating.fetch()[0]
        of_hidden, of_part = chunked_gradients(
            of_lse, of_target, hidden, part[: ctx.rows], targets, lse, *ctx.how
        )
        ctx.rotating.add(0, F.pad(of_part, (0, 0, 0, len(part) - ctx.rows)))
        return of_hidden, *[None] * 6
