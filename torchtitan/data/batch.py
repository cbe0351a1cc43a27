"""A microbatch: token ids, the ids to predict, and where each token stands."""

import dataclasses
from typing import Self

import torch

IGNORED = -100
"""The target that the loss leaves out, as in `torch.nn.functional.cross_entropy`."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """A microbatch of one rank; each field is (B, S) int64."""

    tokens: torch.Tensor
    targets: torch.Tensor
    """The token after each; -100 where there is nothing to predict."""
    positions: torch.Tensor
    """Where in its sequence each token stands."""
    documents: torch.Tensor
    """Which document of its sequence each token belongs to: 0, 1, ..."""

    def target_count(self) -> torch.Tensor:
        """Number of targets that count, as a 0-d int64 tensor where the targets are."""
        return (self.targets != IGNORED).sum()

    def to(self, device: torch.device | str) -> Self:
        moved = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in dataclasses.fields(self)
        }
        return dataclasses.replace(self, **moved)
