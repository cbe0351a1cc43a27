"""Parts of weights that travel around a ring of ranks: each rank computes with one after the other.

Rank r begins with its own part and sends it to r + 1, so that after k hops it has that of r - k. In
the backward the parts come the other way, and the gradient of each travels with it:

    forward, hop k          computes with the part of r - k, then passes it on to r + 1
    backward, k = W-1 ... 0 has the part of r - k again, adds to its gradient what this rank finds,
                            and passes both on to r - 1; the last is its own, whose gradient is home

So W - 1 hops of the weights in the forward, and of weights and gradients in the backward.

A rank keeps its own part. What travels are copies, so a forward without a backward, as in an
evaluation, or a second one, as in recomputation, leaves every rank with what it owns. And what
computes with a part saves the input alone: in the backward it asks for the part that is there. So
autograd never keeps a weight, and whatever recomputes activations works as with any other module.
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
    """Parts on their way to this rank, while its own are on theirs to the next."""

    arriving: list[Tensor]
    works: list[Work]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        self.works.clear()  # they keep what was sent
        return self.arriving


class Neighbours:
    """The ring, as one rank sees it."""

    def __init__(self, group: ProcessGroup, in_place: bool, piece: int) -> None:
        """
        Args:
            in_place: what arrives replaces what was sent, `piece` bytes at a time, and nothing is
                computed meanwhile; else it has a buffer of its own, and arrives during computation.
        """
        self.group, self.in_place, self.piece = group, in_place, piece
        self.size, self.rank = group.size(), group.rank()

    def pass_on(self, sent: Sequence[Tensor], step: int) -> Transfer:
        """Begin to send tensors to the rank `step` further on; what arrives from the other side."""
        to, of = (
            dist.get_global_rank(self.group, (self.rank + n) % self.size) for n in (step, -step)
        )
        arriving = [torch.empty_like(tensor) for tensor in sent]
        operations = [dist.P2POp(dist.isend, tensor, to, self.group) for tensor in sent]
        operations += [dist.P2POp(dist.irecv, tensor, of, self.group) for tensor in arriving]
        return Transfer(arriving, dist.batch_isend_irecv(operations))

    def replace(self, tensors: Sequence[Tensor], step: int) -> None:
        """Send tensors on, and have in their place what arrives from the other side."""
        for tensor in tensors:
            flat, size = tensor.view(-1), self.piece // tensor.itemsize
            for first in range(0, len(flat), size):
                piece = flat[first : first + size]
                piece.copy_(self.pass_on([piece], step).wait()[0])


class Convoy:
    """Parts that travel together, for one forward and the backward of it."""

    def __init__(self, own: Sequence[Tensor], shapes: Sequence[torch.Size], *ring: Any) -> None:
        """
        Args:
            own: this rank's parts.
            shapes: what they are filled up to, equal on all ranks.
            ring: Neighbours, and the Precision in which they travel.
        """
        self.own, self.shapes = own, shapes
        self.ring: Neighbours = ring[0]
        self.precision: Precision = ring[1]
        self.hop = 0
        self.here: list[Tensor] = []
        """What this rank computes with."""
        self.on_way: Transfer | None = None
        self.gradients: list[Tensor] = []
        """Of the parts here: what ranks before and this one have found."""
        self.gradients_on_way: Transfer | None = None

    @property
    def visitor(self) -> int:
        """Whose parts are here."""
        return (self.ring.rank - self.hop) % self.ring.size

    @property
    def is_last(self) -> bool:
        return self.hop == self.ring.size - 1

    def set_out(self) -> None:
        """The forward begins."""
        self.here = self._own(moves=self.ring.size > 1)
        self._overlap(1, not self.is_last)

    def advance(self) -> None:
        """A hop of the forward is done."""
        if self.is_last:
            self.here = []
            return
        self.here = self._moved(1)
        self.hop += 1
        self._overlap(1, not self.is_last)

    def fetch(self) -> list[Tensor]:
        """The parts here, in the backward; there they come only where someone asks for them."""
        if not self.here:
            assert self.is_last, "parts are asked for at every hop or at none"
            self.here = self._own(moves=self.hop > 0)
            if self.hop:
                # The way back begins where the forward ended, one rank away.
                if not self.ring.in_place:
                    self.on_way = self.ring.pass_on(self.here, -1)
                self.here = self._moved(-1)
            self._overlap(-1, self.hop > 1)
        return self.here

    def add(self, index: int, gradient: Tensor) -> None:
        """What this rank finds of the gradient of a part here."""
        if not self.gradients:
            self.gradients = [
                torch.zeros(shape, dtype=self.precision.reduce, device=gradient.device)
                for shape in self.shapes
            ]
        self.gradients[index] += gradient

    def retreat(self) -> None:
        """A hop of the backward is done: gradients are complete as far as this rank goes."""
        if self.ring.in_place:
            self.ring.replace(self.gradients, -1)
        else:
            self._merge()
            self.gradients_on_way = self.ring.pass_on(self.gradients, -1)
            self.gradients = []
        self.hop -= 1
        if self.here and self.hop:
            self.here = self._moved(-1)
            self._overlap(-1, self.hop > 1)
        elif self.here:
            self.here.clear()
            self.here = self._own(moves=False)

    def home(self) -> list[Tensor]:
        """The gradients of this rank's own parts: the sums over all ranks."""
        self._merge()
        self.here = []
        return [
            gradient[tuple(slice(size) for size in own.shape)].to(own.dtype)
            for gradient, own in zip(self.gradients, self.own, strict=True)
        ]

    def _merge(self) -> None:
        """Add what ranks before have found."""
        if self.gradients_on_way:
            for mine, theirs in zip(self.gradients, self.gradients_on_way.wait(), strict=True):
                mine += theirs
            self.gradients_on_way = None

    def _own(self, moves: bool) -> list[Tensor]:
        """This rank's parts, to compute with and, if it `moves`, to send.

        A copy where they are cast, filled up, or would be replaced by what arrives.
        """
        parts = []
        for own, shape in zip(self.own, self.shapes, strict=True):
            part = own.to(self.precision.compute)
            if part.shape != shape:
                missing = (
                    n - m for n, m in zip(reversed(shape), reversed(part.shape), strict=True)
                )
                part = F.pad(part, [end for each in missing for end in (0, each)])
            is_replaced = moves and self.ring.in_place and part.data_ptr() == own.data_ptr()
            parts.append(part.clone() if is_replaced else part.contiguous())
        return parts

    def _overlap(self, step: int, is_needed: bool) -> None:
        """Pass on what is here while it is computed with, if another hop needs it."""
        if is_needed and not self.ring.in_place:
            self.on_way = self.ring.pass_on(self.here, step)

    def _moved(self, step: int) -> list[Tensor]:
        """What is here after a hop."""
        if self.ring.in_place:
            self.ring.replace(self.here, step)
            return self.here
        assert self.on_way is not None
        arrived, self.on_way = self.on_way.wait(), None
        return arrived


class Visit(NamedTuple):
    """One hop: what computes with the parts that are here."""

    convoy: Convoy
    ticket: Tensor
    """0-d: through it the parts have a gradient, which `Convoy.add` then keeps."""

    @property
    def visitor(self) -> int:
        """Whose parts are here."""
        return self.convoy.visitor

    def linear(self, x: Tensor, index: int = 0) -> Tensor:
        """`F.linear(x, part)`: (..., inputs of the part) to (..., its outputs)."""
        out: Tensor = _Linear.apply(x, *self, index)  # type: ignore[no-untyped-call]
        return out

    def inputs(self, x: Tensor, index: int = 0) -> Tensor:
        """Those of all inputs (..., inputs) that a part split by inputs takes."""
        size = self.convoy.shapes[index][-1]
        here = x[..., self.visitor * size : (self.visitor + 1) * size]
        return F.pad(here, (0, missing)) if (missing := size - here.shape[-1]) else here

    def embedding(self, tokens: Tensor, index: int = 0) -> Tensor:
        """`F.embedding` of the tokens (...) whose rows are here, and zeros for others: (..., D)."""
        rows = self.convoy.shapes[index][0]
        local = tokens - self.visitor * rows
        out: Tensor = _Embedding.apply(local, *self, index)  # type: ignore[no-untyped-call]
        return out

    def statistics(
        self, hidden: Tensor, targets: Tensor, chunk: int, backend: str, rows: int
    ) -> tuple[Tensor, Tensor]:
        """`chunked_statistics` (N,) of the logits that the first part makes; of all, there are
        `rows`."""
        most = self.convoy.shapes[0][0]
        first = self.visitor * most
        here = min(max(rows - first, 0), most)
        lse, of_target = _Statistics.apply(  # type: ignore[no-untyped-call]
            hidden, targets - first, *self, here, chunk, backend
        )
        return lse, of_target


def travel(
    own: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    ring: Neighbours,
    precision: Precision,
    compute: Callable[[Visit], tuple[Tensor, ...]],
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """What `compute` makes of the parts of each rank, one after the other, and whose they are.

    Args:
        own: this rank's parts.
        shapes: what they are filled up to, equal on all ranks.
    """
    convoy = Convoy([part.detach() for part in own], shapes, ring, precision)
    ticket = _Depart.apply(convoy, *own)  # type: ignore[no-untyped-call]
    convoy.set_out()
    for hop in range(ring.size):
        visitor, out = convoy.visitor, compute(Visit(convoy, ticket))
        convoy.advance()
        if hop < ring.size - 1:
            ticket, *passed = _Hop.apply(convoy, ticket, *out)  # type: ignore[no-untyped-call]
            out = tuple(passed)
        yield visitor, out


class _Depart(torch.autograd.Function):
    """The begin of the forward; the end of the backward, where the gradients are home."""

    @staticmethod
    def forward(ctx: Any, convoy: Convoy, *own: Tensor) -> Tensor:
        ctx.convoy = convoy
        return own[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.convoy.home()


class _Hop(torch.autograd.Function):
    """Between two hops. Nothing of a hop's backward runs before all of the next one's is done,
    because its results pass through here together with what the next one begins with."""

    @staticmethod
    def forward(ctx: Any, convoy: Convoy, *passed: Tensor) -> tuple[Tensor, ...]:
        ctx.convoy = convoy
        return tuple(tensor.view_as(tensor) for tensor in passed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.convoy.retreat()
        return None, *gradients


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, convoy: Convoy, ticket: Tensor, index: int) -> Tensor:
        ctx.convoy, ctx.index = convoy, index
        ctx.save_for_backward(x)
        return F.linear(x, convoy.here[index])

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        # Before anything is fetched: this may recompute, with a convoy of its own.
        (x,) = ctx.saved_tensors
        convoy, of_x = ctx.convoy, None
        part = convoy.fetch()[ctx.index]
        convoy.add(ctx.index, of_out.flatten(0, -2).T @ x.flatten(0, -2))
        if ctx.needs_input_grad[0]:
            of_x = of_out @ part
        return of_x, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, convoy: Convoy, ticket: Tensor, index: int) -> Tensor:
        part = convoy.here[index]
        is_here = (local >= 0) & (local < len(part))
        place = torch.where(is_here, local, 0)
        ctx.convoy, ctx.index = convoy, index
        ctx.save_for_backward(place, is_here)
        return F.embedding(place, part) * is_here[..., None]

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[None, ...]:
        place, is_here = ctx.saved_tensors
        convoy, index = ctx.convoy, ctx.index
        rows = (of_out * is_here[..., None]).flatten(0, -2).to(convoy.precision.reduce)
        gradient = torch.zeros(convoy.shapes[index], dtype=rows.dtype, device=rows.device)
        convoy.add(index, gradient.index_add_(0, place.flatten(), rows))
        return None, None, None, None


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, convoy: Convoy, ticket: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        rows, *ctx.how = rest
        lse, of_target = chunked_statistics(hidden, convoy.here[0][:rows], targets, *ctx.how)
        ctx.convoy, ctx.rows = convoy, rows
        ctx.save_for_backward(hidden, targets, lse)
        return lse, of_target

    @staticmethod
    def backward(ctx: Any, of_lse: Tensor, of_target: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, lse = ctx.saved_tensors
        part = ctx.convoy.fetch()[0]
        of_hidden, of_part = chunked_gradients(
            of_lse, of_target, hidden, part[: ctx.rows], targets, lse, *ctx.how
        )
        ctx.convoy.add(0, F.pad(of_part, (0, 0, 0, len(part) - ctx.rows)))
        return of_hidden, None, None, None, None, None, None
