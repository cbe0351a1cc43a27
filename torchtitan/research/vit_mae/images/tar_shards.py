"""Images in tar archives, by WebDataset's convention (https://github.com/webdataset/webdataset).

Consecutive files that share a key, the path up to the first dot of the name, form a sample:
`n01/0007.jpg` is an image, `n01/0007.cls` the number of its class. Nothing is unpacked. The headers
are read once, when the shards are opened; images are then read at their offsets.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from torchtitan.config import ConfigError
from torchtitan.data.discovery import fingerprint_files, walk
from torchtitan.remote import refuse_pointer
from torchtitan.research.vit_mae.images.decoding import SUFFIXES, check_packages, decode
from torchtitan.research.vit_mae.images.settings import ImagesConfig

PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
LABEL = ".cls"


class ShardEntry(NamedTuple):
    """Sample of a shard, with the byte offsets of its parts."""

    shard: int
    key: str
    suffix: str
    begin: int
    size: int
    label: tuple[int, int] | None
    """Offset and size of the file with its class."""


class TarShards:
    """Images in a tar file, or in those of a folder, by number: shard by shard."""

    def __init__(self, path: Path, config: ImagesConfig, bands: int) -> None:
        """
        Args:
            bands: number of bands to which a photograph is converted.

        Raises:
            ConfigError: if there are no shards, or one is empty, truncated or not tar.
        """
        self._config, self._bands = config, bands
        root = path if path.is_dir() else path.parent
        self._shards = shards_at(path)
        self._entries = [
            entry
            for number, shard in enumerate(self._shards)
            for entry in entries_of(shard, number)
        ]
        check_packages({entry.suffix for entry in self._entries})
        self.fingerprint = fingerprint_files(self._shards, root)
        labelled = [entry.label is not None for entry in self._entries]
        if any(labelled) and not all(labelled):
            where = self.name(labelled.index(False))
            raise ConfigError(
                f"{where}: it has no {LABEL}, but others have; give all of them one, or none"
            )
        self.has_classes = all(labelled)

    def __len__(self) -> int:
        return len(self._entries)

    def name(self, index: int) -> str:
        entry = self._entries[index]
        return f"{self._shards[entry.shard]}: {entry.key}{entry.suffix}"

    def image(self, index: int) -> Tensor:
        entry, name = self._entries[index], self.name(index)
        content = self._read(entry.shard, entry.begin, entry.size)
        return decode(content, entry.suffix, name, self._config, self._bands)

    def label(self, index: int) -> int:
        entry = self._entries[index]
        assert entry.label is not None, "all have one"
        text = self._read(entry.shard, *entry.label)
        if not text.strip().isdigit():
            shown = text[:20].decode(errors="replace")
            raise ConfigError(
                f"{self._shards[entry.shard]}: {entry.key}{LABEL}: got {shown!r}; wanted the "
                "number of a class"
            )
        return int(text)

    def _read(self, shard: int, begin: int, size: int) -> bytes:
        path = self._shards[shard]
        try:
            with path.open("rb") as file:
                file.seek(begin)
                return file.read(size)
        except OSError as error:
            raise ConfigError(f"{path}: it cannot be read: {error.strerror}") from None


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


def entries_of(path: Path, shard: int) -> Iterator[ShardEntry]:
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
        yield ShardEntry(shard, key, images[0], *parts[images[0]], parts.get(LABEL))


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
