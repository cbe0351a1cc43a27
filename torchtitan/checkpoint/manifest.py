"""The manifest of a checkpoint: its files, their sizes and their hashes.

It is written last, and includes a hash of itself, so a checkpoint whose files match its manifest is
the one that was saved, to the bit: a torn write, a flipped bit and a file of another checkpoint are
all detected. The hash is XXH3 with 128 bits (https://xxhash.com), faster than any disk; it protects
against accidents, not against forgery of both file and manifest.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from torchtitan.checkpoint.store import MANIFEST, store_of
from torchtitan.config import ConfigError
from torchtitan.remote import StoreError, dangling, pointer_at

STATE_FILE = "train_state.json"
FORMAT = 4
INDEX_FORMAT = 3
"""Previous format, with an index of all blocks of all tensors."""
XOR_FORMAT = 2
"""Format before it, whose digests do not depend on the order of elements."""
HASH = "xxh3_128"
OPTIONAL = ("groups", "placements", "here", "start")
"""Fields of a manifest that not every checkpoint has."""
BLOCK = 8 * 2**20


class Damaged(ConfigError):
    """Error that a checkpoint is not what was saved; the message names the file."""


@dataclass(frozen=True)
class File:
    """Expected size and hash of a file."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint and its files."""

    step: int
    model_only: bool
    ranks: int
    layout: Mapping[str, int]
    """Sizes of the mesh axes."""
    digest: str
    """Digest of all tensors, independent of the layout; see `storage`."""
    files: Mapping[str, File]
    format: int = FORMAT
    groups: Sequence[Mapping[str, Any]] = ()
    """Tensors of each group of ranks, with digests; see `layout.RankGroup.to_json`."""
    placements: Sequence[Any] = ()
    """Placements of tensors, which groups name by number."""
    here: Sequence[Sequence[int]] = ()
    """Ranges of the ranks whose files are here, on a disk of a node; empty: all."""
    start: str = ""
    """Start of the run that saved a frequent checkpoint (see `tiers`); empty for others."""

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(file.bytes for file in self.files.values())


def write_json(path: Path, value: Mapping[str, Any]) -> File:
    """Write a line for each key, atomically; return the file's size and hash."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value[key])}" for key in value)
    data = f"{{\n{lines}\n}}\n".encode()
    store_of(path).write(path, data)
    return File(len(data), xxhash.xxh3_128_hexdigest(data))


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest with a hash of its own content."""
    content = {key: value for key, value in vars(manifest).items() if value or key not in OPTIONAL}
    content["files"] = {name: vars(file) for name, file in manifest.files.items()}
    write_json(checkpoint / MANIFEST, content | {HASH: _hash_of(content)})


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and verify the manifest of a checkpoint.

    Raises Damaged if it is missing or changed, and ConfigError if it is of another format.
    """
    path = checkpoint / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_bytes(), object_pairs_hook=_rows)
        found = content.pop(HASH)
    except FileNotFoundError:
        if (checkpoint / ".metadata").exists():
            raise ConfigError(
                f"{checkpoint}: saved by torch's distributed checkpoint, not in format {FORMAT}, "
                "so a run cannot resume from it. To start from it, set "
                "checkpoint.initial_load_path to it, with another job.dump_folder"
            ) from None
        raise Damaged(f"{checkpoint}: it has no {MANIFEST}") from None
    except StoreError:
        raise  # a failed read does not mean that the file is damaged
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(pointer_at(path) or f"{path}: damaged: {error}") from None
    if found != _hash_of(content):
        raise Damaged(f"{path}: damaged: its content does not match its own hash")
    if content["format"] not in (FORMAT, INDEX_FORMAT, XOR_FORMAT):
        raise ConfigError(
            f"{path}: format {content['format']}; this version reads {XOR_FORMAT} to {FORMAT}. "
            "It was written by a newer torchtitan; use that version"
        )
    content.pop("nodes", None)  # in frequent checkpoints whose files were sent to other nodes
    files = {name: File(**file) for name, file in content.pop("files").items()}
    return Manifest(**content, files=files)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error of a disk into `Damaged`; a read that a store fails says nothing of a file."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise Damaged(dangling(path) or f"{path}: {error.strerror}") from None


@contextmanager
def parsing(path: Path, what: str = "") -> Iterator[None]:
    """Turn an error of malformed content into `Damaged`, which says `what` of it is malformed."""
    try:
        yield
    except ConfigError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"{path}: damaged: {what}{error}") from None


def read_whole(checkpoint: Path, manifest: Manifest, name: str) -> bytes:
    """Read and verify a small file of a checkpoint."""
    with reading(checkpoint / name):
        data = (checkpoint / name).read_bytes()
    if File(len(data), xxhash.xxh3_128_hexdigest(data)) != manifest.files[name]:
        raise Damaged(f"{checkpoint / name}: damaged: its bytes differ from those saved")
    return data


def problems_of_sizes(checkpoint: Path, manifest: Manifest) -> Iterator[str]:
    """Yield the files that are missing or have another size, without reading any."""
    size_of = store_of(checkpoint).sizes(checkpoint)
    return _problems(checkpoint, manifest, manifest.files, lambda name: (size_of(name), None))


def problems_of_files(
    checkpoint: Path, manifest: Manifest, names: Iterable[str] | None = None, cached: bool = True
) -> Iterator[str]:
    """Yield what differs from the manifest; unless `cached`, read the disk, not the page cache."""
    names = manifest.files if names is None else names
    return _problems(checkpoint, manifest, names, lambda name: hash_file(checkpoint / name, cached))


def _problems(
    checkpoint: Path,
    manifest: Manifest,
    names: Iterable[str],
    measure: Callable[[str], tuple[int, str | None]],
) -> Iterator[str]:
    """Yield the files whose size or hash differs; `measure` returns both, or None for a hash."""
    for name in names:
        path, file = checkpoint / name, manifest.files[name]
        try:
            size, found = measure(name)
        except StoreError:
            raise
        except OSError as error:
            yield f"{path}: {error.strerror}"
            continue
        if size != file.bytes:
            damage = f"{path}: damaged: it has {size:,} bytes; {file.bytes:,} were saved"
            yield pointer_at(path) or damage
        elif found not in (None, file.xxh3_128):
            yield f"{path}: damaged: its bytes differ from those saved"


def hash_file(path: Path, cached: bool = True) -> tuple[int, str]:
    """Return the size and hash of a file."""
    state, size, block = xxhash.xxh3_128(), 0, bytearray(BLOCK)
    with store_of(path).open(path, cached) as file:
        while count := file.readinto(block):
            state.update(memoryview(block)[:count])
            size += count
    return size, state.hexdigest()


def _rows(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the manifest, which has each name once."""
    rows = dict(pairs)
    if len(rows) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is in it twice")
    return rows


def _hash_of(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
