"""Pictures of a validation, (3, height, width) in 0..1, as bytes and as files."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def pixels(picture: Tensor) -> npt.NDArray[np.uint8]:
    """Convert a picture (3, H, W) in 0..1 to (H, W, 3) in 0..255."""
    whole = (picture * 255).round().to(torch.uint8)
    return np.ascontiguousarray(whole.permute(1, 2, 0).cpu().numpy())


def write_png(path: Path, picture: Tensor) -> None:
    """Write a picture (3, H, W) in 0..1."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(picture)).save(path)
