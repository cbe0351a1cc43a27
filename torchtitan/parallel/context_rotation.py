"""How the keys and values of a group's ranks come to each of them, and their gradients go back.

All at once it takes one collective each way, and memory for those of the whole sequence. Around a
ring a rank holds two ranks' at a time, and the next are on their way while it computes (Ring
Attention with Blockwise Transformers, Liu et al., 2023, arXiv:2310.01889).
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.torch_private.collectives import all_gather, reduce_scatter

Owned = Iterator[tuple[int, Tensor]]
"""Each rank of a group with its keys and values, or their gradient: (2, B, K, S, E)."""


class _Exchange:
    """A tensor on its way to the next rank of the ring, and its like from the previous one."""

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self.sent = tensor  # kept until it has left
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
    """Every rank's keys and values, fetched at once; this rank's first."""
    rank, size = group.rank(), group.size()
    whole = all_gather(kv, group)
    for step in range(size):
        owner = (rank - step) % size
        yield owner, whole[owner]


def _scatter(gradients: Owned, group: ProcessGroup) -> Tensor:
    """The gradient of this rank's keys and values, summed over all ranks at once."""
    whole: Tensor | None = None
    for owner, gradient in gradients:
        if whole is None:
            whole = gradient.new_empty(group.size(), *gradient.shape)
        whole[owner] = gradient
    assert whole is not None
    return reduce_scatter(whole, group)


def _circulate(kv: Tensor, group: ProcessGroup) -> Owned:
    """Every rank's keys and values, this rank's first; the next arrive while these are used."""
    rank, size = group.rank(), group.size()
    for step in range(size):
        arriving = _Exchange(kv, group) if step < size - 1 else None
        yield (rank - step) % size, kv
        if arriving is not None:
            kv = arriving.wait()


def _return(gradients: Owned, group: ProcessGroup) -> Tensor:
    """The gradient of this rank's keys and values, summed on its way around the ring.

    It follows them one step behind: each rank adds its share and passes it on, the last to the
    owner, whose own share never leaves.
    """
    _, own = next(gradients)
    arriving: _Exchange | None = None
    for _, gradient in gradients:
        if arriving is not None:
            gradient += arriving.wait()
        arriving = _Exchange(gradient, group)
    assert arriving is not None, "a ring has at least two ranks"
    return own + arriving.wait()


# How keys and values come, and how their gradients go back.
ROTATIONS = {"allgather": (_gather, _scatter), "ring": (_circulate, _return)}
