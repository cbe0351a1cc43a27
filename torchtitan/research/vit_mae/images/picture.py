"""Images for people: rows of them in one picture."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

GAP = 2
"""Pixels between images."""


def visible(images: Tensor) -> Tensor:
    """What of images (N, bands, H, W) a person can see: the first three bands, or one as gray."""
    shown = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    return shown.float().clamp(0, 1)


def rows_of(rows: Sequence[Tensor]) -> Tensor:
    """Rows of images, each (N, 3, H, W), below each other: (3, height, width) in 0..1."""
    padded = [F.pad(row, (0, GAP, 0, GAP), value=1.0) for row in rows]
    return torch.cat([torch.cat(list(row), 2) for row in padded], 1)[:, :-GAP, :-GAP]
