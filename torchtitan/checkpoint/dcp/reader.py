"""Reader of checkpoints in the format of torch's distributed checkpoint, as a `TensorSource`.

DCP's `HuggingFaceStorageWriter` writes safetensors instead: blocks of tensors, or whole ones. If a
file has blocks, `DCP_SHARDING_INFO` in its header has their offsets in the whole tensor.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`. It is read as data, and
validated: the chunks of a tensor must fill it without overlapping, and each must be within an
existing file.
"""

import io
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan.checkpoint.dcp.items import (
    Inert,
    InertUnpickler,
    Item,
    TensorLayout,
    changed_records,
    layout_of,
)
from torchtitan.checkpoint.manifest import Damaged, parsing, reading
from torchtitan.checkpoint.ranges import (
    Files,
    Sizes,
    StoredBlock,
    TensorSource,
    contiguous,
    files_in,
    join_pieces,
    read_header,
    sizes,
)
from torchtitan.checkpoint.store import MANIFEST, store_of
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
    """Read the contents of a checkpoint; raise ConfigError unless its files have all of it."""
    path = checkpoint / METADATA
    with reading(path):
        data = path.read_bytes()
    refuse_pointer(path, data)
    with parsing(path):
        contents = _Parser(path, data).contents()
    _check_files(checkpoint, contents)
    return contents


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
            at = None if offset is None else sizes(offset, tuple)
            self.items[key["fqn"], at] = self._item(info)
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
        dtype, shape = properties[0], sizes(fields["size"], tuple)
        if not isinstance(dtype, torch.dtype):
            raise Damaged(f"{self.path}: damaged: the dtype of {name} is {dtype!r}")
        chunks: list[Chunk] = []
        for chunk in fields["chunks"]:
            where = self._state(chunk, f"{_DCP}.ChunkStorageMetadata")
            offsets = sizes(where["offsets"], tuple)
            chunks.append(Chunk(offsets, sizes(where["sizes"], tuple), self._of(name, offsets)))
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


def is_dcp(folder: Path) -> bool:
    """Whether `dcp.save` wrote, or is writing, a folder in its own format."""
    signs = (METADATA, "*.distcp", "__*.metadata")
    return not (folder / MANIFEST).exists() and any(any(folder.glob(sign)) for sign in signs)


def saved_by_dcp(path: Path) -> bool:
    """Whether `dcp.save` wrote it, safetensors included."""
    signs = ("shard-*.safetensors", "model-*-of-*.safetensors", "sharded/*.safetensors")
    has_manifest = (path / MANIFEST).is_file()
    return is_dcp(path) or (not has_manifest and any(any(path.glob(sign)) for sign in signs))


class DcpCheckpoint(TensorSource):
    """Checkpoint written by `dcp.save`, with its own names, nested by dots."""

    def __init__(self, path: Path) -> None:
        """Open a checkpoint without reading tensors; raise ConfigError unless it is whole."""
        self.folder = path
        if (path / METADATA).exists():
            self.contents: Contents = read_metadata(path)
        elif folder := find_shards(path):
            self.folder, self.contents = folder, read_shards(folder)
        elif not path.is_dir():
            raise ConfigError(f"{path}: there is no such folder")
        elif any(path.glob("__*.metadata")):
            raise ConfigError(
                f"{path}: each rank has its own metadata, which is not supported; save with "
                "use_collectives=True"
            )
        elif any(path.glob("*.distcp")) or any(path.glob("*.tmp")):
            raise ConfigError(
                f"{path}: still being written, or never finished: {METADATA}, which is written "
                "last, is missing"
            )
        else:
            raise ConfigError(f"{path}: not a checkpoint: it has no {METADATA}")
        self._files = files_in(self.folder)
        self._layouts: dict[Item, TensorLayout] = {}
        self.kinds = {name: (e.dtype, e.shape) for name, e in self.contents.tensors.items()}

    def values(self) -> Iterable[str]:
        """Return the names of values that are not tensors."""
        return self.contents.values.keys()

    def value(self, name: str) -> Any:
        """Read a value that is not a tensor; raise ConfigError unless it is plain."""
        item = self.contents.values[name]
        where = f"{self.folder / item.file}: {name}"
        data = self._files.read(item.file, item.offset, item.offset + item.length)
        try:
            return torch.load(io.BytesIO(data), "cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{where}: refused: it contains more than plain values: {reason}"
            ) from None
        except (RuntimeError, EOFError, LookupError, TypeError, ValueError) as error:
            raise Damaged(f"{where}: damaged: {error}") from None

    def number(self, name: str) -> Any:
        """Read a number, also if it is a tensor or in the value before the dot; None: missing."""
        part, _, key = name.partition(".")
        tensors, values = self.contents
        value: Any = None
        if name in tensors:
            value = self.read(name)
        elif name in values:
            value = self.value(name)
        elif part in values and isinstance(whole := self.value(part), Mapping):
            value = whole.get(key)
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    def part(self, name: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        entry = self.contents.tensors[name]

        def block(chunk: Chunk, at: Sizes, shape: Sizes) -> Tensor:
            layout = self._layout(name, chunk)
            place = layout.file, layout.begin
            return self._files.block(place, layout.dtype, layout.strides, at, shape)

        where = f"{self.folder}: {name}"
        return join_pieces(entry.dtype, offsets, sizes, entry.chunks, block, where)

    @property
    def files(self) -> set[str]:
        """Names of the files of all items."""
        return {item.file for _, item, _ in self._items()}

    @property
    def bytes(self) -> int:
        """Total size of all items."""
        return sum(item.length for _, item, _ in self._items())

    def verify(self) -> Iterator[str | None]:
        """Read everything and yield the problem of each item: "" if there is none, None if it has
        no checksums to tell."""
        return (self._verify_item(*each) for each in self._items())

    def _items(self) -> Iterator[tuple[str, Item | TensorLayout, Chunk | None]]:
        yield from ((name, item, None) for name, item in self.contents.values.items())
        for name, entry in self.contents.tensors.items():
            yield from ((name, chunk.place, chunk) for chunk in entry.chunks)

    def _verify_item(self, name: str, item: Item | TensorLayout, chunk: Chunk | None) -> str | None:
        if isinstance(item, TensorLayout):
            return None
        where = f"{self.folder / item.file}: {name}"
        try:
            if chunk:
                self._layout(name, chunk)
            changed = changed_records(self._files, item, where)
        except ConfigError as error:
            return str(error)
        if changed is None:
            return None
        return f"{where}: damaged: its bytes differ from those saved" if changed else ""

    def _layout(self, name: str, chunk: Chunk) -> TensorLayout:
        """Return the layout of a chunk in its file, verified against the metadata."""
        item = chunk.place
        if isinstance(item, TensorLayout):
            return item
        if item not in self._layouts:
            where = f"{self.folder / item.file}: {name}"
            layout, dtype = layout_of(self._files, item, where), self.contents.tensors[name].dtype
            if (layout.dtype, layout.shape) != (dtype, chunk.sizes):
                raise Damaged(
                    f"{where}: not the saved file: found {layout.dtype} {layout.shape}, wanted "
                    f"{dtype} {chunk.sizes}"
                )
            self._layouts[item] = layout
        return self._layouts[item]


INDEX = "model.safetensors.index.json"


def find_shards(checkpoint: Path) -> Path | None:
    """Return the folder of the files, if there are any.

    DCP assembles whole tensors from the files in `sharded`, and writes the index after that.
    """
    sharded = checkpoint / "sharded"
    has_whole = any(checkpoint.glob("*.safetensors"))
    if any(sharded.glob("*.safetensors")) and not (has_whole and (checkpoint / INDEX).exists()):
        return sharded
    return checkpoint if has_whole else None


def read_shards(folder: Path) -> Contents:
    """Read the contents of the files; raise ConfigError if they are damaged or incomplete."""
    files, found = files_in(folder), dict[str, list[Chunk]]()
    for path in sorted(folder.glob("*.safetensors")):
        with parsing(path, "its header is invalid: "):
            for name, chunk in _chunks(path, files):
                found.setdefault(name, []).append(chunk)
    return Contents({name: _entry(folder, name, chunks) for name, chunks in found.items()}, {})


def _entry(folder: Path, name: str, chunks: list[Chunk]) -> TensorEntry:
    layouts = [chunk.place for chunk in chunks if isinstance(chunk.place, TensorLayout)]
    if len({(layout.dtype, len(layout.shape)) for layout in layouts}) > 1:
        raise Damaged(f"{folder}: damaged: {name} is not the same tensor in all files")
    ends = [
        [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks
    ]
    shape = tuple(max(column) for column in zip(*ends, strict=True))
    if problem := problem_of_chunks(shape, chunks):
        raise Damaged(f"{folder}: a file is missing or of another checkpoint: {name}: {problem}")
    return TensorEntry(layouts[0].dtype, shape, tuple(chunks))


def _chunks(path: Path, files: Files) -> Iterator[tuple[str, Chunk]]:
    header = read_header(path, files)
    for name, stored in header.tensors.items():
        if stored.dtype is None:
            raise ConfigError(f"{path}: {name}: dtype {stored.code} is not supported")
        strides = contiguous(stored.shape)
        layout = TensorLayout(path.name, stored.dtype, stored.shape, strides, stored.begin)
        yield name, Chunk(header.offsets(name), stored.shape, layout)
