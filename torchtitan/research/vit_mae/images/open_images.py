"""Opens the images that a recipe names, as a source that lanes can read.

`IMAGES` maps the kind of a data set whose `content` is images to the function that opens it.
"""

from collections.abc import Callable

from torchtitan.config import ConfigError, Context, RecipeError, local_path, show
from torchtitan.data.file_cache import reading
from torchtitan.data.settings import DATASETS, DataConfig, Dataset
from torchtitan.research.vit_mae.images.decoding import PHOTOGRAPHS, RASTERS
from torchtitan.research.vit_mae.images.folders import ImageFolder
from torchtitan.research.vit_mae.images.scenes import Scenes
from torchtitan.research.vit_mae.images.settings import images_of
from torchtitan.research.vit_mae.images.source import Images, ImageView, ShuffledImages
from torchtitan.research.vit_mae.images.tar_shards import TarShards

HELD_OUT_SEED = 1
"""Seed of held-out scenes, which differ from those of any other seed."""

OpenImages = Callable[[Dataset, DataConfig, int, int], Images]
"""Function of data set, section, and the model's height = width and bands, that opens images."""


def _open_scenes(dataset: Dataset, config: DataConfig, size: int, bands: int) -> Images:
    seed = HELD_OUT_SEED if dataset.split == "validation" else 0
    return Scenes(seed=seed, size=size, channels=bands)


def _open_folder(dataset: Dataset, config: DataConfig, size: int, bands: int) -> Images:
    suffixes = RASTERS if dataset.kind == "rasters" else PHOTOGRAPHS
    return ImageFolder(local_path(str(config.dataset_path)), suffixes, images_of(config), bands)


def _open_shards(dataset: Dataset, config: DataConfig, size: int, bands: int) -> Images:
    return TarShards(local_path(str(config.dataset_path)), images_of(config), bands)


IMAGES: dict[str, OpenImages] = {
    "scenes": _open_scenes,
    "image_folder": _open_folder,
    "image_shards": _open_shards,
    "rasters": _open_folder,
}


@reading()
def open_view(config: DataConfig, *, size: int, bands: int) -> ImageView:
    """Open the images that a section names, by number.

    Args:
        size: height and width in pixels of the model's input.
        bands: number of bands of the model's input.

    Raises:
        ConfigError: if they cannot be opened, or do not match the model.
    """
    if found := [p.within("data") for p in config.problems(Context())]:
        raise RecipeError(f"{p.path}: {p.message}" for p in found)
    dataset = DATASETS.get(config.dataset)
    if dataset is None or dataset.kind not in IMAGES:
        named = ", ".join(name for name, each in DATASETS.items() if each.kind in IMAGES)
        raise ConfigError(
            f"data.dataset: got {show(config.dataset)}; it has no images; wanted one with "
            f"images, such as {named}"
        )
    images = IMAGES[dataset.kind](dataset, config, size, bands)
    return ImageView(images, images_of(config), size=size, bands=bands)


@reading()
def check_images(config: DataConfig) -> None:
    """Check the files that a section names, if any, without decoding them.

    Raises:
        ConfigError: if they are not images, with the reason.
    """
    dataset = DATASETS.get(config.dataset)
    if dataset and dataset.kind in IMAGES and not any(config.problems(Context())):
        IMAGES[dataset.kind](dataset, config, 1, 3)


def open_images(config: DataConfig, *, size: int, bands: int, seed: int) -> ShuffledImages:
    """Open the images that a section names, as documents; each holds an `ImageSample`.

    Args, Raises: as in `open_view`.
    """
    images = open_view(config, size=size, bands=bands)
    return ShuffledImages(config.dataset, images, seed=seed, shuffle=config.shuffle)
