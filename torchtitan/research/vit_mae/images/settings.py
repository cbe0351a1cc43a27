"""The sections `[data]` and `[data.images]` of a run on images."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field

from torchtitan.config import Config, Context, Problem
from torchtitan.data.settings import DataConfig


class ImagesConfig(Config):
    """How images are read, and what of each is trained on."""

    crop: Literal["resized", "window", "none"] = Field(
        "resized",
        description="What is cut from an image. resized: a part of random area and shape, resized "
        "to what the model takes; window: as many pixels as the model takes, at a random place; "
        "none: the whole image, which has to have that size.",
    )
    min_area: float = Field(
        0.2,
        gt=0,
        le=1,
        description='With crop = "resized": the least share of an image that is cut from it.',
    )
    flips: tuple[Literal["horizontal", "vertical"], ...] = Field(
        ("horizontal",), description="How every other image, drawn at random, is mirrored."
    )
    augment: bool = Field(
        True,
        description="Crop and flip at random, anew in each epoch; false, as in validation: cut "
        "from the center, flip nothing.",
    )
    bands: tuple[int, ...] = Field(
        (), description="Bands to read, in this order, counted from 0; empty: all."
    )
    max_value: float | None = Field(
        None,
        gt=0,
        description="The value that becomes 1; absent: the largest of an integer type, and 1 of "
        "floating-point numbers.",
    )
    corrupt: Literal["stop", "skip"] = Field(
        "stop",
        description="What an image that cannot be decoded does. stop: it ends the run; skip: it is "
        "named in the log, counted in the metrics, and left out.",
    )

    def problems(self, context: Context) -> Iterator[Problem]:
        if len(set(self.flips)) < len(self.flips):
            yield Problem("flips", "wanted each direction once")
        if any(band < 0 for band in self.bands):
            yield Problem("bands", "wanted integers >= 0")
        if self.crop != "resized" and "min_area" in self.model_fields_set:
            message = f'it is of self.crop = "resized", and that is "{self.crop}"'
            yield Problem("min_area", message, ("crop",))


class ImageData(DataConfig):
    """Which images to train on, and how they are read."""

    images: ImagesConfig = ImagesConfig()

    def held_out(self) -> Self:
        images = self.images.model_copy(update={"augment": False})
        return super().held_out().model_copy(update={"images": images})


def images_of(config: DataConfig) -> ImagesConfig:
    """The section `[data.images]`, or its defaults where nothing chose `ImageData`."""
    return config.images if isinstance(config, ImageData) else ImagesConfig()
