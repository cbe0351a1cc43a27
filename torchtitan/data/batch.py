"""A microbatch: token ids and, one to the right, the ids to predict."""

import dataclasses

import torch

IGNORED = -100
"""The target that the loss leaves out, as in `torch.nn.functional.cross_entropy`."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """A microbatch of one rank."""

    tokens: torch.Tensor
    """(B, S) int64"""
    targets: torch.Tensor
    """(B, S) int64: the token after each; -100 where there is nothing to predict."""

    def target_count(self) -> torch.Tensor:
        """Number of targets that count, as a 0-d int64 tensor where the targets are."""
        return (self.targets != IGNORED).sum()

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(
            self.tokens.to(device, non_blocking=True), self.targets.to(device, non_blocking=True)
        )
