"""Images as documents that lanes read: in a shuffled order, each with a new crop in every epoch.

An image is cropped and flipped by random numbers from (seed, epoch, index in the data set) alone.
So it is the same on every layout, with any number of processes, and after a resume. An image that
is left out is left out of its lane, which continues with its own next image; so that does not
depend on the layout either.
"""

import json
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from torchtitan.config import ConfigError
from torchtitan.data.sources import ShuffledDocuments
from torchtitan.logging import logger
from torchtitan.research.vit_mae.images.crop import Crop
from torchtitan.research.vit_mae.images.decoding import CorruptImage
from torchtitan.research.vit_mae.images.settings import ImagesConfig

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

    def image(self, index: int, crop: Crop) -> Tensor:
        """Read a part of an image: (bands, height, width), uint8 or float32 in 0..1.

        It may be reduced by `crop.reduction`.

        Raises:
            CorruptImage: if it cannot be decoded.
            ConfigError: if it cannot be read, or does not have the required size.
        """

    def label(self, index: int) -> int:
        """Return the number of an image's class, if images have classes; not used in training.

        Raises:
            ConfigError: if the class is missing.
        """


class ImageSample(NamedTuple):
    """Part of an image to train on in an epoch."""

    image: Tensor
    """Pixels (bands, size, size), uint8 or float32 in 0..1."""
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
        draw = None
        if seed is not None and self.config.augment:
            draw = np.random.default_rng([seed, epoch, index, VIEWS])
        crop = Crop(self.config, self.size, draw, self.images.name(index))
        image = self.images.image(index, crop)
        if len(image) != self.bands:
            hint = "" if self.config.bands else "; select some with data.images.bands"
            raise ConfigError(
                f"{crop.name}: it has {len(image)} bands, but the model takes {self.bands}{hint}"
            )
        return ImageSample(crop.finish(image), epoch, index)


class ShuffledImages(ShuffledDocuments):
    """Images as samples, shuffled again for each epoch."""

    in_processes = True

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
