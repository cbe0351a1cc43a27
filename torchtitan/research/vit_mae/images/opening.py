"""Opens the images that a recipe names, as a source that lanes can read.

`IMAGES` maps the kind of a data set whose `content` is images to how it is opened.
"""

from collections.abc import Callable

from torchtitan.config import ConfigError, Context, local_path, show
from torchtitan.data.settings import DATASETS, DataConfig, Dataset
from torchtitan.research.vit_mae.images.decoding import PHOTOGRAPHS, RASTERS
from torchtitan.research.vit_mae.images.folders import ImageFolder
from torchtitan.research.vit_mae.images.scenes import Scenes
from torchtitan.research.vit_mae.images.settings import images_of
from torchtitan.research.vit_mae.images.shards import TarShards
from torchtitan.research.vit_mae.images.source import Images, ImageView, ShuffledImages

HELD_OUT_SEED = 1
"""Scenes of another seed are other scenes."""

OpenImages = Callable[[Dataset, DataConfig, int, int], Images]
"""(data set, section, height and width and bands that the model takes) to the images."""


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


def open_view(config: DataConfig, *, size: int, bands: int) -> ImageView:
    """The images that a section names, by number.

    Args:
        size: height and width in pixels that the model takes.
        bands: how many it takes.

    Raises:
        ConfigError: they cannot be had, or do not fit.
    """
    if found := [p.within("data") for p in config.problems(Context())]:
        raise ConfigError("\n".join(f"{p.path}: {p.message}" for p in found))
    dataset = DATASETS.get(config.dataset)
    if dataset is None or dataset.kind not in IMAGES:
        named = ", ".join(name for name, each in DATASETS.items() if each.kind in IMAGES)
        raise ConfigError(
            f"data.dataset: got {show(config.dataset)}; it holds no images, as {named} do"
        )
    images = IMAGES[dataset.kind](dataset, config, size, bands)
    return ImageView(images, images_of(config), size=size, bands=bands)


def check_images(config: DataConfig) -> None:
    """Look at the files that a section names, if it names any, without decoding them.

    Raises:
        ConfigError: they are no images, and why.
    """
    dataset = DATASETS.get(config.dataset)
    if dataset and dataset.kind in IMAGES and not any(config.problems(Context())):
        IMAGES[dataset.kind](dataset, config, 1, 3)


def open_images(config: DataConfig, *, size: int, bands: int, seed: int) -> ShuffledImages:
    """The images that a section names, as documents; each holds an `ImageSample`.

    Args, Raises: as of `open_view`.
    """
    images = open_view(config, size=size, bands=bands)
    return ShuffledImages(config.dataset, images, seed=seed, shuffle=config.shuffle)
