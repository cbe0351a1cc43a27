"""Opens the images that a recipe names, as a source that lanes can read.

`IMAGES` maps the kind of a data set whose `content` is images to the function that opens it.

A folder of files has a class for each subfolder, in the order of their names.

Tar archives follow WebDataset's convention (https://github.com/webdataset/webdataset). Consecutive
files that share a key, the path up to the first dot of the name, form a sample: `n01/0007.jpg` is
an image, `n01/0007.cls` the number of its class. Nothing is unpacked. The headers are read once,
when the shards are opened; images are then read at their offsets.

Scenes are drawn, for experiments without a download. A scene is a figure on a ground. Both have the
same stripes, vertical in the figure and horizontal in the ground, and the class is the shape of the
figure. The phase of the stripes, their contrast and tint, and the position of the figure are drawn
independently of the class. So the mean of a pixel is the same in all classes, and no patch alone
reveals the class: only where stripes turn.

Stripes repeat after `PERIOD` pixels, which divides the usual patches. So a hidden patch can be
restored from visible ones, given whether it is inside the figure, which a masked autoencoder must
learn.
"""

import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtitan.config import ConfigError, Context, RecipeError, hub, show
from torchtitan.data.discovery import fingerprint_files, walk
from torchtitan.data.file_cache import reading
from torchtitan.data.settings import DATASETS, DataConfig, Dataset
from torchtitan.remote import path_to_read, refuse_pointer
from torchtitan.research.vit_mae.images.crop import Crop
from torchtitan.research.vit_mae.images.decoding import (
    PHOTOGRAPHS,
    RASTERS,
    SUFFIXES,
    check_packages,
    decode,
)
from torchtitan.research.vit_mae.images.settings import images_of
from torchtitan.research.vit_mae.images.source import Images, ImageView, ShuffledImages

Array = npt.NDArray[np.float64]
Figure = Callable[[Array, Array], npt.NDArray[np.bool_]]
"""Function from columns and rows, both (H, W) in -0.5..0.5 from the center, to the inside."""

TURN: Final = 2 * np.pi
PERIOD: Final = 4
"""Number of pixels after which stripes repeat."""
MOVED: Final = 0.1
"""Maximum distance of a figure from the center, as a fraction of the image."""
SCENES: Final = 3
"""Number that distinguishes the draws of scenes from others of the same seed."""

FIGURES: Final[dict[str, Figure]] = {
    "left": lambda x, y: x < 0,
    "top": lambda x, y: y < 0,
    "falling": lambda x, y: x > y,
    "rising": lambda x, y: x < -y,
    "disc": lambda x, y: np.hypot(x, y) < 0.4,
    "cross": lambda x, y: np.minimum(abs(x), abs(y)) < 0.2,
    "quarters": lambda x, y: (x < 0) ^ (y < 0),
    "bars": lambda x, y: np.sin(2 * TURN * x) < 0,
}


class Scenes:
    """Scenes by number; each is a function of (seed, number) alone."""

    classes: Sequence[str] = tuple(FIGURES)
    has_classes = True

    def __init__(
        self, *, seed: int = 0, size: int = 32, channels: int = 3, length: int = 50_000
    ) -> None:
        """
        Args:
            size: height and width in pixels.
            length: number of scenes; a larger number adds scenes after the same ones.
        """
        self._seed, self._size, self._channels, self._length = seed, size, channels, length
        self.fingerprint = f"scenes, version 2, {size} x {size} x {channels}, seed {seed}"

    def __len__(self) -> int:
        return self._length

    def name(self, index: int) -> str:
        """Return the name of a scene in messages."""
        return f"scene {index}"

    def label(self, index: int) -> int:
        """Return the number of a scene's class, which is drawn first."""
        return self._begin(index)[0]

    def _begin(self, index: int) -> tuple[int, np.random.Generator]:
        draw = np.random.default_rng([self._seed, index, 0, SCENES])
        return int(draw.integers(len(FIGURES))), draw

    def image(self, index: int, crop: Crop | None = None) -> Tensor:
        """Return a scene, (channels, size, size) float32 in 0..1, or a part of it."""
        label, draw = self._begin(index)
        column, row = np.meshgrid(*2 * [np.arange(self._size)])
        right, down = draw.uniform(-MOVED, MOVED, size=2)
        center = (self._size - 1) / 2
        inside = FIGURES[self.classes[label]](
            (column - center) / self._size - right, (row - center) / self._size - down
        )
        upright, level = draw.uniform(size=2)
        turns = np.where(inside, column / PERIOD + upright, row / PERIOD + level)
        light, tint = draw.uniform(-1, 1, size=(2, self._channels, 1, 1))
        contrast = draw.uniform(0.25, 0.4) * (1 + 0.15 * tint)
        image = 0.5 + 0.05 * light + contrast * np.sin(TURN * turns)
        image += draw.normal(scale=0.03, size=image.shape)
        whole = torch.from_numpy(np.clip(image, 0, 1).astype(np.float32))
        return crop.part(whole) if crop else whole


PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
LABEL = ".cls"


class StoredImage(NamedTuple):
    """Image that is a file, or a part of an archive."""

    file: Path
    key: str
    """Key of the sample in an archive; "" if the file is the image."""
    suffix: str
    begin: int = 0
    size: int = -1
    """Number of bytes from `begin` on; -1: all."""
    label: int | tuple[int, int] | None = None
    """Number of its class, or offset and size of the file with it."""


class ImageFiles:
    """Images in a folder or in tar files, by number."""

    def __init__(self, entries: Sequence[StoredImage], root: Path, bands: int) -> None:
        """
        Args:
            entries: the images; all have a class, or none has.
            root: folder to which the fingerprint's names are relative.
            bands: number of bands to which a photograph is converted.

        Raises:
            ConfigError: if a decoder is not installed.
        """
        self._entries, self._bands = entries, bands
        check_packages({entry.suffix for entry in entries})
        files = dict.fromkeys(entry.file for entry in entries)
        self.fingerprint = fingerprint_files([*files], root)
        self.has_classes = entries[0].label is not None

    def __len__(self) -> int:
        return len(self._entries)

    def name(self, index: int) -> str:
        return _name(self._entries[index])

    def image(self, index: int, crop: Crop) -> Tensor:
        entry = self._entries[index]
        content = _read(entry.file, entry.begin, entry.size)
        return decode(content, entry.suffix, self._bands, crop)

    def label(self, index: int) -> int:
        entry = self._entries[index]
        assert entry.label is not None, "all have one"
        if isinstance(entry.label, int):
            return entry.label
        text = _read(entry.file, *entry.label)
        if not text.strip().isdigit():
            shown = text[:20].decode(errors="replace")
            raise ConfigError(
                f"{entry.file}: {entry.key}{LABEL}: got {shown!r}; wanted the number of a class"
            )
        return int(text)


def _name(entry: StoredImage) -> str:
    return f"{entry.file}: {entry.key}{entry.suffix}" if entry.key else str(entry.file)


def _read(path: Path, begin: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(size)
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read: {error.strerror}") from None


def open_shards(dataset: Dataset, config: DataConfig, size: int, bands: int) -> ImageFiles:
    """Open the images in a tar file, or in those of a folder: shard by shard.

    Raises:
        ConfigError: if there are no shards, one is empty, truncated or not tar, or only some
            images have a class.
    """
    path = path_to_read(str(config.dataset_path), hub.DATA)
    entries = [entry for shard in shards_at(path) for entry in entries_of(shard)]
    bare = [entry for entry in entries if entry.label is None]
    if 0 < len(bare) < len(entries):
        raise ConfigError(
            f"{_name(bare[0])}: it has no {LABEL}, but others have; give all of them one, or none"
        )
    root = path if path.is_dir() else path.parent
    return ImageFiles(entries, root, bands)


def shards_at(path: Path) -> list[Path]:
    """Return the tar files at a path, in the order of their names.

    Raises:
        ConfigError: if there are none, or they are compressed.
    """
    found = sorted(walk(path), key=Path.as_posix)
    for file in found:
        if file.name.lower().endswith(PACKED):
            raise ConfigError(
                f"{file}: a compressed archive can only be read from its start; unpack it to .tar"
            )
    shards = [file for file in found if file.suffix.lower() == ".tar"]
    if not shards:
        raise ConfigError(f"{path} has no shards (.tar)")
    for file in shards:
        refuse_pointer(file)
    return shards


def entries_of(path: Path) -> Iterator[StoredImage]:
    """Yield the samples of a shard, in their order in it.

    Raises:
        ConfigError: if it is empty, truncated, or not tar; or a sample is invalid.
    """
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    last = None
    for name, begin, size in _files(path):
        folder, _, file = name.rpartition("/")
        stem, _, rest = file.partition(".")
        if not stem:
            continue  # hidden
        key = f"{folder}/{stem}" if folder else stem
        if key != last and key in samples:
            raise ConfigError(
                f"{path}: the files of {key} are not adjacent; write the shard again with the "
                "files of a sample together"
            )
        last = key
        samples.setdefault(key, {})[f".{rest.lower()}"] = begin, size
    if not samples:
        raise ConfigError(f"{path}: the shard is empty")
    for key, parts in samples.items():
        images = [suffix for suffix in parts if suffix in SUFFIXES]
        if len(images) != 1:
            found = f"{len(images)} images" if images else f"no image, only {', '.join(parts)}"
            raise ConfigError(f"{path}: {key} has {found}; wanted one image")
        yield StoredImage(path, key, images[0], *parts[images[0]], parts.get(LABEL))


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name, offset and size of each file of an archive."""
    length = path.stat().st_size
    if not length:
        raise ConfigError(f"{path}: the shard is empty")
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.offset_data + member.size > length:
                    raise ConfigError(f"{path}: it is truncated, within {member.name}")
                if member.isfile():
                    yield member.name.removeprefix("./"), member.offset_data, member.size
    except tarfile.TarError as error:
        raise ConfigError(f"{path}: not a complete tar archive: {error}") from None


def open_folder(dataset: Dataset, config: DataConfig, size: int, bands: int) -> ImageFiles:
    """Open the photographs or rasters in a folder, in the order of their names.

    Raises:
        ConfigError: if there are none, or they do not all have a class.
    """
    root = path_to_read(str(config.dataset_path), hub.DATA)
    suffixes = RASTERS if dataset.kind == "rasters" else PHOTOGRAPHS
    if not root.is_dir():
        raise ConfigError(f"{root} is a file; wanted a folder of images")
    images = (path for path in walk(root) if path.suffix.lower() in suffixes)
    files = sorted(images, key=Path.as_posix)
    if not files:
        raise ConfigError(f"{root} has no images ({', '.join(suffixes)})")
    labels = {name: number for number, name in enumerate(classes_of(root, files))}
    for file in files:
        refuse_pointer(file)
    classes = (labels.get(file.relative_to(root).parts[0]) for file in files)
    entries = [
        StoredImage(file, "", file.suffix.lower(), label=label)
        for file, label in zip(files, classes, strict=True)
    ]
    return ImageFiles(entries, root, bands)


def classes_of(root: Path, files: Sequence[Path]) -> Sequence[str]:
    """Return the subfolders with these files, in the order of their names; none if all are loose.

    Raises:
        ConfigError: if only some are loose, or a subfolder has none.
    """
    loose = [file.name for file in files if file.parent == root]
    if len(loose) == len(files):
        return ()
    if loose:
        raise ConfigError(
            f"{root} has images both directly ({loose[0]}) and in subfolders, which are classes; "
            "move all into subfolders, or none"
        )
    filled = {file.relative_to(root).parts[0] for file in files}
    for folder in sorted(each for each in root.iterdir() if each.is_dir()):
        if folder.name not in filled and not folder.name.startswith("."):
            raise ConfigError(f"{folder} is a class without images; remove it")
    return sorted(filled)


HELD_OUT_SEED = 1
"""Seed of held-out scenes, which differ from those of any other seed."""

OpenImages = Callable[[Dataset, DataConfig, int, int], Images]
"""Function of data set, section, and the model's height = width and bands, that opens images."""


def open_scenes(dataset: Dataset, config: DataConfig, size: int, bands: int) -> Images:
    seed = HELD_OUT_SEED if dataset.split == "validation" else 0
    return Scenes(seed=seed, size=size, channels=bands)


IMAGES: dict[str, OpenImages] = {
    "scenes": open_scenes,
    "image_folder": open_folder,
    "image_shards": open_shards,
    "rasters": open_folder,
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
