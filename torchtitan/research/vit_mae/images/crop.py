"""Crop of an image to the input of a model: its part, resized and mirrored.

A crop is a part of random area, a window, or all of it. After Szegedy et al., "Going deeper with
convolutions" (https://arxiv.org/abs/1409.4842): the area of a part is uniform, and so is the
logarithm of its aspect ratio, width / height, from 3/4 to 4/3.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.config import ConfigError
from torchtitan.research.vit_mae.images.settings import ImagesConfig

MOST_STRETCHED = 4 / 3
TRIES = 10
"""Number of draws of a random part that may exceed the image, before taking the largest square."""
REDUCTIONS = (8, 4, 2, 1)
"""Factors by which a JPEG can be reduced while it is decoded."""

Box = tuple[int, int, int, int]
"""Top, left, height and width."""


class Crop(NamedTuple):
    """Crop of one image; call `box` once, and then `finish`, as both draw."""

    config: ImagesConfig
    size: int
    """Height and width in pixels of the result."""
    draw: np.random.Generator | None
    """Random numbers; None: crop the center, without a flip."""
    name: str
    """Name of the image in messages."""

    def box(self, height: int, width: int) -> Box:
        """Return the part of an image of this size to read.

        Raises:
            ConfigError: if the image does not have the size that the section requires.
        """
        size, kind = self.size, self.config.crop
        if kind == "resized":
            return _part(height, width, self.config.min_area, self.draw)
        if min(height, width) < size or (kind == "none" and max(height, width) > size):
            model = "but the model takes" if kind == "none" else "too few for a window of"
            raise ConfigError(
                f"{self.name}: it has {height} x {width} pixels, {model} {size} x {size}; use "
                'data.images.crop = "resized"'
            )
        return _window(height, width, size, self.draw)

    def reduction(self, box: Box) -> int:
        """Return the largest factor that leaves a part at least as large as the result."""
        return next(n for n in REDUCTIONS if n == 1 or min(box[2:]) >= n * self.size)

    def part(self, image: Tensor) -> Tensor:
        """Return the part to read of a whole image (bands, H, W)."""
        top, left, height, width = self.box(*image.shape[1:])
        return image[:, top : top + height, left : left + width]

    def finish(self, image: Tensor) -> Tensor:
        """Resize and flip the part that was read: (bands, size, size)."""
        if image.shape[1:] != (self.size, self.size):
            image = _resized(image, self.size)
        if self.draw is not None:
            chosen = [flip for flip in self.config.flips if self.draw.random() < 0.5]
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
    """Resize by cubic interpolation, within the range of the part, which it may exceed."""
    resized = F.interpolate(image[None], (size, size), mode="bicubic", antialias=True)[0]
    if image.dtype == torch.uint8:
        return resized  # rounded, and within 0..255
    return resized.clamp(image.amin((1, 2), keepdim=True), image.amax((1, 2), keepdim=True))


def unit(image: Tensor) -> Tensor:
    """Convert bytes to float32 in 0..1; an image that is float32 is returned."""
    return image / 255 if image.dtype == torch.uint8 else image
