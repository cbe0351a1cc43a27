"""Exchange of keys and values among the ranks of a group, and the return of their gradients.

`allgather` takes one collective each way, and memory for the keys and values of the whole sequence.
Around a `ring`, a rank holds those of two ranks at a time, and the next arrive while it computes
(Ring Attention with Blockwise Transformers, Liu et al., 2023, arXiv:2310.01889).
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.torch_private.distributed import all_gather, reduce_scatter

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
