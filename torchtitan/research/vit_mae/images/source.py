"""Images as documents that lanes read: in a shuffled order, each with a new crop in every epoch.

An image is cropped and flipped by random numbers from (seed, epoch, index in the data set) alone.
So it is the same on every layout, with any number of threads, and after a resume. An image that is
left out is left out of its lane, which continues with its own next image; so that does not depend
on the layout either.

A crop is a part of random area, a window, or all of it. After Szegedy et al., "Going deeper with
convolutions" (https://arxiv.org/abs/1409.4842): the area of a part is uniform, and so is the
logarithm of its aspect ratio, width / height, from 3/4 to 4/3."""

import json
import math
from typing import NamedTuple, Protocol

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from torchtitan.config import ConfigError
from torchtitan.data.sources import ShuffledDocuments
from torchtitan.logging import logger
from torchtitan.research.vit_mae.images.decoding import CorruptImage
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


VIEWS = 2
"""Number that distinguishes the draws of views from others of the same seed."""


class Images(Protocol):
    """Interface to images by number."""

    fingerprint: str
    """Fingerprint of the source of the images."""
    has_classes: bool
    """Whether each image has a class."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return the name of an image in messages: its file."""

    def image(self, index: int) -> Tensor:
        """Read an image, (bands, H, W) float32 in 0..1.

        Raises:
            CorruptImage: if it cannot be decoded.
            ConfigError: if it cannot be read.
        """

    def label(self, index: int) -> int:
        """Return the number of an image's class, if images have classes; not used in training.

        Raises:
            ConfigError: if the class is missing.
        """


class ImageSample(NamedTuple):
    """Part of an image to train on in an epoch."""

    image: Tensor
    """Pixels (bands, size, size), float32 in 0..1."""
    epoch: int
    number: int
    """Index in the data set. All random draws of a sample follow from seed, epoch and number."""


class ImageView:
    """View of a data set's images as a model's input."""

    def __init__(self, images: Images, config: ImagesConfig, *, size: int, bands: int) -> None:
        """
        Args:
            size: height and width in pixels of the model's input.
            bands: number of bands of the model's input.

        Raises:
            ConfigError: if the section's images have another number of bands.
        """
        self.images, self.config, self.size, self.bands = images, config, size, bands
        self.windows = [0, len(images)]
        settings = json.dumps(config.model_dump(mode="json", exclude={"corrupt"}))
        self.fingerprint = f"{images.fingerprint}/{size} x {size} x {bands}/{settings}"
        if config.bands and len(config.bands) != bands:
            raise ConfigError(
                f"data.images.bands: got {list(config.bands)}; wanted {bands} bands, as the "
                "model takes"
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> ImageSample:
        return self.sample(index)

    def sample(self, index: int, epoch: int = 0, seed: int | None = None) -> ImageSample:
        """Return the sample of an image in an epoch.

        Args:
            seed: seed of the draws; None: nothing is random, regardless of the section.

        Raises:
            CorruptImage: if it cannot be decoded.
            ConfigError: if it does not have the required size or bands.
        """
        image = self.images.image(index)
        draw = None
        if seed is not None and self.config.augment:
            draw = np.random.default_rng([seed, epoch, index, VIEWS])
        try:
            if len(image) != self.bands:
                hint = "" if self.config.bands else "; select some with data.images.bands"
                raise ConfigError(
                    f"it has {len(image)} bands, but the model takes {self.bands}{hint}"
                )
            image = view(image, self.config, self.size, draw)
        except ConfigError as error:
            raise ConfigError(f"{self.images.name(index)}: {error}") from None
        return ImageSample(image, epoch, index)


class ShuffledImages(ShuffledDocuments):
    """Images as samples, shuffled again for each epoch."""

    def __init__(self, name: str, images: ImageView, *, seed: int, shuffle: bool) -> None:
        super().__init__(name, images, seed=seed, shuffle=shuffle)
        self._images, self._seed, self.nulls = images, seed, None
        self.corrupt: dict[str, str] = {}
        """Images that were left out, by name, with the reasons."""

    def _content(self, epoch: int, index: int) -> ImageSample | None:
        try:
            return self._images.sample(index, epoch, self._seed)
        except CorruptImage as error:
            if self._images.config.corrupt == "stop":
                raise
            name = self._images.images.name(index)
            if name not in self.corrupt:
                self.corrupt[name] = str(error)
                logger.warning(
                    "skipped image %d, which cannot be decoded: %s", len(self.corrupt), error
                )
            return None
