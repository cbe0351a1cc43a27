"""`.metadata` of a DCP checkpoint: its tensors and values, and their locations.

The file is a pickle of `torch.distributed.checkpoint.metadata.Metadata`. It is read as data, and
validated: the chunks of a tensor must fill it without overlapping, and each must be within an
existing file.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from torchtitan.checkpoint.dcp.items import Item, TensorLayout
from torchtitan.checkpoint.dcp.pickles import Inert, InertUnpickler
from torchtitan.checkpoint.manifest import Damaged, reading
from torchtitan.checkpoint.ranges import Sizes
from torchtitan.checkpoint.storage import StoredBlock
from torchtitan.checkpoint.store import store_of
from torchtitan.config import ConfigError
from torchtitan.remote import refuse_pointer

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint.metadata"
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
NAMES = {
    *(f"{_DCP}.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(f"{_DCP}.{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
    *(f"{_DCP}.{name}" for name in ("ChunkStorageMetadata", "TensorProperties")),
    *(f"{_DCP}._MEM_FORMAT_ENCODING", _INFO),
    *("torch.Size", "torch.serialization._get_layout"),
    *(
        f"pathlib{local}.{system}Path"
        for local in ("", "._local")
        for system in ("Posix", "Windows")
    ),
}
"""All classes and functions that DCP of torch 2.4 to 2.13 names in `.metadata`."""


Chunk = StoredBlock[Item | TensorLayout]
"""Block of a tensor: in an item, or at a known place."""


class TensorEntry(NamedTuple):
    """Tensor of a checkpoint."""

    dtype: torch.dtype
    shape: Sizes
    chunks: tuple[Chunk, ...]


class Contents(NamedTuple):
    """Contents of a checkpoint, by name."""

    tensors: dict[str, TensorEntry]
    values: dict[str, Item]


def read_metadata(checkpoint: Path) -> Contents:
    """Read the contents of a checkpoint, verified to be within existing files.

    Raises:
        ConfigError: if it is still being written, names anything outside the format, or is
            compressed.
        Damaged: if the file is malformed, or the files it refers to are missing or truncated.
    """
    path = checkpoint / METADATA
    with reading(path):
        data = path.read_bytes()
    refuse_pointer(path, data)
    try:
        contents = _Parser(path, data).contents()
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise Damaged(f"{path}: damaged: {error}") from None
    _check_files(checkpoint, contents)
    return contents


def unfinished(checkpoint: Path) -> ConfigError:
    """Return the error for a folder without metadata."""
    if not checkpoint.is_dir():
        return ConfigError(f"{checkpoint}: there is no such folder")
    if any(checkpoint.glob("__*.metadata")):
        return ConfigError(
            f"{checkpoint}: each rank has its own metadata, which is not supported; save with "
            "use_collectives=True"
        )
    if any(checkpoint.glob("*.distcp")) or any(checkpoint.glob("*.tmp")):
        return ConfigError(
            f"{checkpoint}: still being written, or never finished: {METADATA}, which is written "
            "last, is missing"
        )
    return ConfigError(f"{checkpoint}: not a checkpoint: it has no {METADATA}")


class _Parser:
    """Parser of `Metadata`, which raises if anything is malformed."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.pickle = path, InertUnpickler(data, path, NAMES)
        self.items: dict[tuple[str, Sizes | None], Item] = {}

    def contents(self) -> Contents:
        metadata = self._state(self.pickle.read(), f"{_DCP}.Metadata")
        for index, info in metadata["storage_data"].items():
            key = self._state(index, f"{_DCP}.MetadataIndex")
            offset = key.get("offset")
            self.items[key["fqn"], None if offset is None else _sizes(offset)] = self._item(info)
        contents = Contents({}, {})
        for name, about in metadata["state_dict_metadata"].items():
            if not isinstance(name, str):
                raise Damaged(f"{self.path}: damaged: a name is {name!r}")
            if self.pickle.is_a(about, f"{_DCP}.BytesStorageMetadata"):
                contents.values[name] = self._of(name, None)
            else:
                contents.tensors[name] = self._entry(name, about)
        return contents

    def _entry(self, name: str, about: Any) -> TensorEntry:
        fields = self._state(about, f"{_DCP}.TensorStorageMetadata")
        properties = fields["properties"].state
        dtype, shape = properties[0], _sizes(fields["size"])
        if not isinstance(dtype, torch.dtype):
            raise Damaged(f"{self.path}: damaged: the dtype of {name} is {dtype!r}")
        chunks: list[Chunk] = []
        for chunk in fields["chunks"]:
            where = self._state(chunk, f"{_DCP}.ChunkStorageMetadata")
            offsets, sizes = _sizes(where["offsets"]), _sizes(where["sizes"])
            chunks.append(Chunk(offsets, sizes, self._of(name, offsets)))
        if problem := problem_of_chunks(shape, chunks):
            raise Damaged(f"{self.path}: damaged: {name}: {problem}")
        return TensorEntry(dtype, shape, tuple(chunks))

    def _of(self, name: str, offsets: Sizes | None) -> Item:
        if (name, offsets) not in self.items:
            at = "" if offsets is None else f" at {offsets}"
            raise Damaged(f"{self.path}: damaged: it does not record where {name}{at} is")
        return self.items[name, offsets]

    def _item(self, info: Any) -> Item:
        fields = self._state(info, _INFO)
        if fields.get("transform_descriptors"):
            raise ConfigError(
                f"{self.path}: compressed or encrypted by {fields['transform_descriptors']}, which "
                "is not supported; save the checkpoint without _extensions"
            )
        file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise ConfigError(f"{self.path}: refused: it names a file outside its folder: {file}")
        if not all(isinstance(n, int) for n in (offset, length)) or offset < 0 or length < 1:
            raise Damaged(f"{self.path}: damaged: an item at {offset!r}, {length!r} bytes long")
        return Item(str(file), offset, length)

    def _state(self, value: Any, name: str) -> dict[str, Any]:
        if not self.pickle.is_a(value, name) or not isinstance(value.state, dict):
            found = type(value).__name__ if isinstance(value, Inert) else repr(value)
            wanted = name.rpartition(".")[2]
            raise Damaged(f"{self.path}: damaged: found {found:.80} in place of {wanted}")
        return value.state


def _sizes(value: Any) -> Sizes:
    if not isinstance(value, tuple) or not all(isinstance(n, int) and n >= 0 for n in value):
        raise ValueError(f"found {value!r:.80} in place of sizes")
    return value


def problem_of_chunks(shape: Sizes, chunks: Sequence[Chunk]) -> str | None:
    """Return why blocks do not cover a tensor exactly once; None if they do."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape) or any(
            at + size > whole
            for at, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        ):
            return f"the block {chunk.sizes} at {chunk.offsets} is not within {shape}"
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        return f"its blocks do not add up to {shape}"
    if pair := next(_overlapping(shape, chunks), None):
        return f"the blocks at {pair[0].offsets} and {pair[1].offsets} overlap"
    return None


def _overlapping(shape: Sizes, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Chunk]]:
    """Yield overlapping blocks, by a sweep along the dim with the most cuts."""
    if not shape:
        return
    dim = max(range(len(shape)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    open_chunks: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
        open_chunks = [o for o in open_chunks if o.offsets[dim] + o.sizes[dim] > chunk.offsets[dim]]
        for other in open_chunks:
            if 0 not in chunk.sizes and all(
                a < b + m and b < a + n for a, n, b, m in zip(*chunk[:2], *other[:2], strict=True)
            ):
                yield other, chunk
        open_chunks.append(chunk)


def _check_files(checkpoint: Path, contents: Contents) -> None:
    """Raise Damaged if a file is missing, or shorter than its contents."""
    places = [chunk.place for entry in contents.tensors.values() for chunk in entry.chunks]
    ends: dict[str, int] = {}
    for item in (*contents.values.values(), *places):
        if isinstance(item, Item):
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
    size_of = store_of(checkpoint).sizes(checkpoint)
    for file, end in ends.items():
        with reading(checkpoint / file):
            size = size_of(file)
        if size < end:
            refuse_pointer(checkpoint / file)
            raise Damaged(f"{checkpoint / file}: cut: it has {size:,} bytes; {end:,} were saved")
