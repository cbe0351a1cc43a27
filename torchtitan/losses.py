"""The training loss."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the default of torch: a target that does not count


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropy of every target that counts, in nats, computed in float32.

    A sum, because only the global batch knows how many targets to divide by.

    Args:
        logits: (batch, sequence, vocabulary), any floating dtype.
        targets: (batch, sequence) int64; torch's mark -100 is a target that does not count.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        reduction="sum",
    )


class _InPlaceOf(torch.autograd.Function):
    """A total in place of `x`, one of its parts: what follows is the same on all ranks, so the
    gradient passes as it is."""

    @staticmethod
    def forward(context: Any, x: Tensor, total: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Not within the function above: torch 2.11 would compile it to one without a gradient.
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    replaced: Tensor = _InPlaceOf.apply(x, total)  # type: ignore[no-untyped-call]
    return replaced


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup, vocabulary: int
) -> Tensor:
    """`cross_entropy` of logits that are split on the vocabulary over the ranks of `group`.

    Three numbers a token cross the ranks instead of its logits: the largest logit, the sum of the
    exponentials and the logit of the target (Shoeybi et al., 2019, arXiv:1909.08053, section 3).

    Args:
        logits: (batch, sequence, this rank's part of the vocabulary): equal parts but the last.
        targets: (batch, sequence) int64, as for `cross_entropy`.
        vocabulary: size of the whole vocabulary.
    """
    first = dist.get_rank(group) * -(-vocabulary // dist.get_world_size(group))
    x = logits.float()
    largest = x.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    x = x - largest[..., None]
    exponentials = _sum_over_ranks(x.exp().sum(-1), group)
    local = targets - first
    is_mine = (local >= 0) & (local < x.shape[-1])
    picked = x.gather(-1, torch.where(is_mine, local, 0)[..., None])[..., 0]
    of_target = _sum_over_ranks(torch.where(is_mine, picked, 0.0), group)
    losses = exponentials.log() - of_target
    return torch.where(targets == IGNORED, 0.0, losses).sum()
