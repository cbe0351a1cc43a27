"""Formats of shards of tokens: how each finds the documents in its files.

A format is the settings class of `[data.format]`; `name = "auto"` takes the first that recognizes
the files. To read the shards of other software, add its class to `TOKEN_FORMATS`.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from torchtitan.config import Config, ConfigError, Registry
from torchtitan.data.discovery import walk
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.tokens.index import INDEX, ShardTable, read_tables
from torchtitan.remote import RemotePath, refuse_pointer

HEAD = 4096
"""Bytes at the start of an `index.json` that tell whose it is."""

Bytes = npt.NDArray[np.uint8]


def damaged(file: Path, byte: int, message: str) -> ConfigError:
    """Return the error for a file that cannot be what it should be."""
    return ConfigError(f"{file}: byte {byte:,}: {message}")


def find(path: Path, suffix: str) -> list[Path]:
    """Return the file at `path`, or all files in that folder, whose names end with `suffix`."""
    if not isinstance(path, RemotePath):
        found = walk(path)  # which leaves our own indices out, in a hidden folder
    else:
        found = iter([path]) if path.is_file() else path.glob("[!.]*")
    named = sorted(file for file in found if file.name.lower().endswith(suffix.lower()))
    for file in named:
        if not isinstance(file, RemotePath):
            refuse_pointer(file)
    return named


def in_its_case(path: Path) -> Path:
    """Return `path`, or the same with its suffix in capitals if only that exists."""
    capitals = path.with_suffix(path.suffix.upper())
    return capitals if capitals.exists() and not path.exists() else path


def indices(path: Path, key: str) -> list[Path]:
    """Return each `index.json` at `path` that is empty or has `key` near its start.

    One at the top describes the shards of all folders.
    """
    found = []
    for file in find(path, INDEX):
        with file.open("rb") as stream:
            head = stream.read(HEAD)
        if not head or f'"{key}"'.encode() in head:
            found.append(file)
    return [file for file in found if file.parent == path] or found


def read_json(file: Path) -> Any:
    """Read a JSON file.

    Raises:
        ConfigError: if it is damaged, with the byte.
    """
    content = file.read_bytes()
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        byte = len(error.doc[: error.pos].encode())
        raise damaged(file, byte, f"not JSON: {error.msg}; restore or write it again") from None
    except UnicodeDecodeError as error:
        raise damaged(file, error.start, "not UTF-8; restore or write it again") from None


def size_of(file: Path) -> int:
    """Return the bytes of a file.

    Raises:
        ConfigError: if it is missing, or only a pointer of Git LFS.
    """
    try:
        size = file.stat().st_size
        if size < 1024 and not isinstance(file, RemotePath):
            refuse_pointer(file)
        return size
    except FileNotFoundError:
        raise ConfigError(f"{file}: it is missing; restore it") from None


def contents(file: Path) -> Bytes:
    """Map a file into memory, as bytes.

    Raises:
        ConfigError: if it is missing.
    """
    return np.memmap(file, np.uint8, "r") if size_of(file) else np.zeros(0, np.uint8)


def unpack(file: Path, content: Bytes, layout: str) -> tuple[Any, ...]:
    """Unpack the header of a file, in the notation of `struct`."""
    size = struct.calcsize(layout)
    if len(content) < size:
        raise damaged(file, len(content), f"truncated: its header has {size} bytes")
    return struct.unpack(layout, bytes(content[:size]))


def array(content: Bytes, dtype: str, count: int, start: int) -> npt.NDArray[Any]:
    """Return the `count` numbers from byte `start`."""
    return content[start : start + count * np.dtype(dtype).itemsize].view(dtype)


def read_offsets(
    file: Path, content: Bytes, wanted: int, items: str
) -> tuple[int, npt.NDArray[np.int64]]:
    """Read the start of a shard: u32 n, u32[n + 1] first byte of each item and the end of the last.

    Args:
        wanted: number of items that the index of the shards has recorded.
        items: word for them in errors.

    Returns:
        the first byte after the offsets, and the offsets.
    """
    (count,) = unpack(file, content, "<I")
    if count != wanted:
        raise damaged(file, 0, f"it has {count:,} {items}, and {INDEX} says {wanted:,}")
    header, size = 4 * (count + 2), len(content)
    if size < header:
        raise damaged(file, size, f"truncated: the offsets end at byte {header:,}")
    offsets = array(content, "<u4", count + 1, 4).astype(np.int64)
    steps = np.diff(offsets, prepend=header, append=size)
    if offsets[-1] != size or (steps < 0).any():
        place = first(steps < 0)
        wrong = count if place is None else min(place, count)
        message = f"the {items} do not divide its {size:,} bytes in order"
        raise damaged(file, 4 + 4 * wrong, message)
    return header, offsets


def gather(content: Bytes, starts: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Return the number at each of `starts`, which need no alignment."""
    size = np.dtype(dtype).itemsize
    return content[starts[:, None] + np.arange(size)].view(dtype)[:, 0]


def first(wrong: npt.NDArray[np.bool_]) -> int | None:
    """Return the place of the first True, if there is one."""
    place = int(wrong.argmax()) if len(wrong) else 0
    return place if len(wrong) and wrong[place] else None


def shard_table(
    root: Path, file: Path, dtype: str, starts: npt.NDArray[Any], lengths: npt.NDArray[Any]
) -> ShardTable:
    """Return the table of a shard whose documents are at these bytes, with these lengths."""
    if (long := first(lengths >= 2**32)) is not None:
        message = f"document {long} has {lengths[long]:,} tokens; wanted fewer than 2^32"
        raise damaged(file, int(starts[long]), message)
    return ShardTable(
        file.relative_to(root).as_posix(),
        file.stat().st_size,
        dtype,
        starts.astype(np.uint64),
        lengths.astype(np.uint32),
    )


class TokenFormat(Config):
    """Format of shards of tokens."""

    name: str = "auto"
    """Format; auto: found from the files."""

    def files(self, path: Path) -> list[Path]:
        """Return the files at `path` that determine the documents; none if it has another format.

        An index is built again if the size or the time of modification of one of them changes.
        """
        return []

    def resolved(self, tokenizer: Tokenizer) -> Self:
        """Return the format with the settings that follow from the tokenizer."""
        return self

    def tables(self, path: Path, tokenizer: Tokenizer) -> Iterator[ShardTable]:
        """Find the documents of each shard; `ShardTable.file` is relative to `root_of(path)`.

        Args:
            tokenizer: the model's, for formats that do not say what ends a document or what dtype
                tokens have.

        Raises:
            ConfigError: if a file is damaged, with the file and byte.
        """
        raise NotImplementedError

    def digests(self, path: Path) -> Iterator[tuple[Path, Mapping[str, str]]]:
        """Yield each file whose digests the format records, with them by algorithm."""
        return iter(())


def root_of(path: Path) -> Path:
    """Return the folder of the shards at `path`, a folder or a file."""
    return path if path.is_dir() else path.parent


class OwnFormat(TokenFormat):
    """Shards of `torchtitan data tokenize`: the index is next to them."""

    name: str = "torchtitan"
    """Name of the format."""

    def files(self, path: Path) -> list[Path]:
        return indices(path / INDEX, "fingerprint")

    def tables(self, path: Path, tokenizer: Tokenizer) -> Iterator[ShardTable]:
        return read_tables(path)


TOKEN_FORMATS = Registry[type[TokenFormat]](
    "token_format",
    {
        "auto": TokenFormat,
        "torchtitan": OwnFormat,
        "megatron": "torchtitan.data.tokens.foreign_formats:MegatronFormat",
        "mds": "torchtitan.data.tokens.foreign_formats:MosaicFormat",
        "datatrove": "torchtitan.data.tokens.foreign_formats:DatatroveFormat",
        "litdata": "torchtitan.data.tokens.foreign_formats:LitDataFormat",
        "raw": "torchtitan.data.tokens.raw:RawFormat",
    },
)
"""Formats of shards by their name in recipes, in the order in which `auto` tries them."""
