"""Images for display: rows of them in one picture."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

GAP = 2
"""Number of pixels between images."""


def visible(images: Tensor) -> Tensor:
    """Return the displayable bands of images (N, bands, H, W): the first three, or one as gray."""
    shown = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    return shown.float().clamp(0, 1)


def rows_of(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows of images, each (N, 3, H, W), vertically: (3, height, width) in 0..1."""
    padded = [F.pad(row, (0, GAP, 0, GAP), value=1.0) for row in rows]
    return torch.cat([torch.cat(list(row), 2) for row in padded], 1)[:, :-GAP, :-GAP]
