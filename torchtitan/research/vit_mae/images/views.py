"""Crops of an image: a part of random area, a window, or all of it.

After Szegedy et al., "Going deeper with convolutions" (https://arxiv.org/abs/1409.4842): the area
of a part is uniform, and so is the logarithm of its aspect ratio, width / height, from 3/4 to 4/3.
"""

import math

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from torchtitan.config import ConfigError
from torchtitan.research.vit_mae.images.settings import ImagesConfig

MOST_STRETCHED = 4 / 3
TRIES = 10
"""Number of draws of a random part that may exceed the image, before taking the largest square."""

Box = tuple[int, int, int, int]
"""Top, left, height and width."""


def view(
    image: Tensor, config: ImagesConfig, size: int, draw: np.random.Generator | None
) -> Tensor:
    """Crop and resize an image for a model.

    Args:
        image: (bands, H, W).
        size: height and width of the result.
        draw: random numbers; None: crop the center, without a flip.

    Returns:
        (bands, size, size).

    Raises:
        ConfigError: if the image does not have the size that `config` requires.
    """
    height, width = image.shape[1:]
    if config.crop == "none" and (height, width) != (size, size):
        raise ConfigError(
            f"it has {height} x {width} pixels, but the model takes {size} x {size}; use "
            'data.images.crop = "resized"'
        )
    if config.crop == "window" and min(height, width) < size:
        raise ConfigError(
            f"it has {height} x {width} pixels, too few for a window of {size} x {size}; use "
            'data.images.crop = "resized"'
        )
    if config.crop == "resized":
        top, left, height, width = _part(height, width, config.min_area, draw)
    else:
        top, left, height, width = _window(height, width, size, draw)
    image = image[:, top : top + height, left : left + width]
    if (height, width) != (size, size):
        image = _resized(image, size)
    if draw is not None:
        chosen = [flip for flip in config.flips if draw.random() < 0.5]
        dims = [{"vertical": 1, "horizontal": 2}[flip] for flip in chosen]
        image = image.flip(dims) if dims else image
    return image.contiguous()


def _part(height: int, width: int, least: float, draw: np.random.Generator | None) -> Box:
    for _ in range(TRIES if draw is not None else 0):
        assert draw is not None
        area = height * width * draw.uniform(least, 1.0)
        stretch = math.exp(draw.uniform(-math.log(MOST_STRETCHED), math.log(MOST_STRETCHED)))
        h, w = round(math.sqrt(area / stretch)), round(math.sqrt(area * stretch))
        if 0 < h <= height and 0 < w <= width:
            return int(draw.integers(height - h + 1)), int(draw.integers(width - w + 1)), h, w
    return _window(height, width, min(height, width), None)


def _window(height: int, width: int, size: int, draw: np.random.Generator | None) -> Box:
    if draw is None:
        return (height - size) // 2, (width - size) // 2, size, size
    top, left = int(draw.integers(height - size + 1)), int(draw.integers(width - size + 1))
    return top, left, size, size


def _resized(image: Tensor, size: int) -> Tensor:
    """Resize by cubic interpolation, clamped to the range of the part, since it may overshoot."""
    low, high = image.amin((1, 2), keepdim=True), image.amax((1, 2), keepdim=True)
    resized = F.interpolate(image[None], (size, size), mode="bicubic", antialias=True)[0]
    return resized.clamp(low, high)
