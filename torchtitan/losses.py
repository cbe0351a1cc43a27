"""The training loss."""

import torch.nn.functional as F
from torch import Tensor


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
