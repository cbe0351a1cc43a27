"""Sections `[data]` and `[data.images]` of a run on images."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field

from torchtitan.config import Config, Context, Problem
from torchtitan.data.settings import DataConfig, Dataset


class ImagesConfig(Config):
    """Reading of images, and the part of each to train on."""

    crop: Literal["resized", "window", "none"] = "resized"
    """Crop of an image. resized: a region of random area and shape, resized to the model's
    size; window: a region of the model's size, at a random place; none: the whole image, which must
    have that size."""
    min_area: float = Field(0.2, gt=0, le=1)
    """With crop = "resized": minimum fraction of an image's area."""
    flips: tuple[Literal["horizontal", "vertical"], ...] = ("horizontal",)
    """Directions in which a random half of the images is mirrored."""
    augment: bool = True
    """Crop and flip at random, differently in each epoch; false, as in validation: crop the center
    and do not flip."""
    bands: tuple[int, ...] = ()
    """Bands to read, in this order, counted from 0; empty: all."""
    max_value: float | None = Field(None, gt=0)
    """Value that becomes 1 (default: the largest of an integer type, or 1 for floating-point
    numbers)."""
    corrupt: Literal["stop", "skip"] = "stop"
    """Reaction to an image that cannot be decoded. stop: end the run; skip: log its name, count it
    in the metrics, and skip it."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if len(set(self.flips)) < len(self.flips):
            yield Problem("flips", "wanted each direction once")
        if any(band < 0 for band in self.bands):
            yield Problem("bands", "wanted integers >= 0")
        if self.crop != "resized" and self.min_area != type(self).model_fields["min_area"].default:
            message = f'it only has an effect with self.crop = "resized", not "{self.crop}"'
            yield Problem("min_area", message, ("crop",))


class ImageData(DataConfig):
    """Images to train on, and how to read them."""

    images: ImagesConfig = ImagesConfig()

    def held_out(self) -> Self:
        images = self.images.model_copy(update={"augment": False})
        return super().held_out().model_copy(update={"images": images})


def images_of(config: DataConfig) -> ImagesConfig:
    """Return the section `[data.images]`, or its defaults if the section is not `ImageData`."""
    return config.images if isinstance(config, ImageData) else ImagesConfig()


SCENES = Dataset("scenes", "figures with classes, drawn, no download", content="images", drawn=True)
SCENES_VALIDATION = Dataset(
    "scenes", "others like them, held out", split="validation", content="images", drawn=True
)
IMAGE_FOLDER = Dataset(
    "image_folder",
    "photographs under data.dataset_path; subfolders are classes",
    content="images",
    reads_path=True,
)
IMAGE_SHARDS = Dataset(
    "image_shards",
    "tar files under data.dataset_path, as WebDataset's",
    content="images",
    reads_path=True,
)
RASTERS = Dataset(
    "rasters",
    "npy and GeoTIFF files under data.dataset_path, of any number of bands",
    content="images",
    reads_path=True,
)
