"""Images as documents that lanes read: in a shuffled order, each cut anew in every epoch.

An image is cut and flipped by random numbers from (seed, epoch, index in the data set), and by
nothing else. So it is the same on every layout, with any number of threads, and after a resume.
An image that is left out is left out of its lane, which goes on to the next of its own; so that
does not depend on the layout either.
"""

import json
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from torchtitan.config import ConfigError
from torchtitan.data.sources import ShuffledDocuments
from torchtitan.logging import logger
from torchtitan.research.vit_mae.images.decoding import CorruptImage
from torchtitan.research.vit_mae.images.settings import ImagesConfig
from torchtitan.research.vit_mae.images.views import view

VIEWS = 2
"""Tells the draws of views from others of the same seed."""


class Images(Protocol):
    """Images by number."""

    fingerprint: str
    """Changes with what they are read from."""
    has_classes: bool
    """Whether each image has a class."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What messages call an image: its file."""

    def image(self, index: int) -> Tensor:
        """An image, (bands, H, W) float32 in 0..1.

        Raises:
            CorruptImage: if it cannot be decoded.
            ConfigError: if it cannot be read.
        """

    def label(self, index: int) -> int:
        """The number of its class, where images have classes; training does not ask for it.

        Raises:
            ConfigError: what should say it does not.
        """


class ImageSample(NamedTuple):
    """What is trained on of an image in an epoch."""

    image: Tensor
    """(bands, size, size) float32 in 0..1."""
    epoch: int
    number: int
    """In the data set. Whatever else is drawn for a sample follows from seed, epoch and number."""


class ImageView:
    """What a model is given of the images of a data set."""

    def __init__(self, images: Images, config: ImagesConfig, *, size: int, bands: int) -> None:
        """
        Args:
            size: height and width in pixels that the model takes.
            bands: how many the model takes.

        Raises:
            ConfigError: if the section is of images with another number of bands.
        """
        self.images, self.config, self.size, self.bands = images, config, size, bands
        self.windows = [0, len(images)]
        settings = json.dumps(config.model_dump(mode="json", exclude={"corrupt"}))
        self.fingerprint = f"{images.fingerprint}/{size} x {size} x {bands}/{settings}"
        if config.bands and len(config.bands) != bands:
            raise ConfigError(
                f"data.images.bands: got {list(config.bands)}; the model takes {bands} bands, so "
                f"name {bands}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> ImageSample:
        return self.sample(index)

    def sample(self, index: int, epoch: int = 0, seed: int | None = None) -> ImageSample:
        """What an epoch sees of an image.

        Args:
            seed: None: nothing is random, whatever the section says.

        Raises:
            CorruptImage: if it cannot be decoded.
            ConfigError: if it does not have the size or bands that it should have.
        """
        image = self.images.image(index)
        draw = None
        if seed is not None and self.config.augment:
            draw = np.random.default_rng([seed, epoch, index, VIEWS])
        try:
            if len(image) != self.bands:
                hint = "" if self.config.bands else "; data.images.bands chooses some"
                raise ConfigError(
                    f"it has {len(image)} bands, and the model takes {self.bands}{hint}"
                )
            image = view(image, self.config, self.size, draw)
        except ConfigError as error:
            raise ConfigError(f"{self.images.name(index)}: {error}") from None
        return ImageSample(image, epoch, index)


class ShuffledImages(ShuffledDocuments):
    """Images in an order drawn anew for each epoch, as samples."""

    def __init__(self, name: str, images: ImageView, *, seed: int, shuffle: bool) -> None:
        super().__init__(name, images, seed=seed, shuffle=shuffle)
        self._images, self._seed = images, seed
        self.corrupt: dict[str, str] = {}
        """Images that were left out, by name, and why."""

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
                    "image %d that cannot be decoded, left out: %s", len(self.corrupt), error
                )
            return None
