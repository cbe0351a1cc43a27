"""Reader of checkpoints in the format of torch's distributed checkpoint, as a `TensorSource`.

DCP's `HuggingFaceStorageWriter` writes safetensors instead: blocks of tensors, or whole ones. If a
file has blocks, `DCP_SHARDING_INFO` in its header has their offsets in the whole tensor.
"""

import io
import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint.dcp.items import Item, TensorLayout, changed_records, layout_of
from torchtitan.checkpoint.dcp.metadata import (
    METADATA,
    Chunk,
    Contents,
    TensorEntry,
    problem_of_chunks,
    read_metadata,
    unfinished,
)
from torchtitan.checkpoint.manifest import Damaged
from torchtitan.checkpoint.ranges import Files, Sizes, contiguous, files_in, read_header, sizes
from torchtitan.checkpoint.storage import assemble
from torchtitan.checkpoint.store import MANIFEST
from torchtitan.config import ConfigError


def is_dcp(folder: Path) -> bool:
    """Whether `dcp.save` wrote, or is writing, a folder in its own format."""
    signs = (METADATA, "*.distcp", "__*.metadata")
    return not (folder / MANIFEST).exists() and any(any(folder.glob(sign)) for sign in signs)


def saved_by_dcp(path: Path) -> bool:
    """Whether `dcp.save` wrote it, safetensors included."""
    signs = ("shard-*.safetensors", "model-*-of-*.safetensors", "sharded/*.safetensors")
    has_manifest = (path / MANIFEST).is_file()
    return is_dcp(path) or (not has_manifest and any(any(path.glob(sign)) for sign in signs))


class DcpCheckpoint:
    """Checkpoint written by `dcp.save`, with its own names, nested by dots."""

    def __init__(self, path: Path) -> None:
        """Open a checkpoint without reading tensors.

        Raises:
            ConfigError: if it is still being written, or requests code execution.
            Damaged: if a file is missing, truncated or malformed.
        """
        self.path, self.folder = path, path
        if (path / METADATA).exists():
            self.contents: Contents = read_metadata(path)
        elif folder := find_shards(path):
            self.folder, self.contents = folder, read_shards(folder)
        else:
            raise unfinished(path)
        self._files = files_in(self.folder)
        self._layouts: dict[Item, TensorLayout] = {}

    def shapes(self) -> dict[str, tuple[torch.dtype, Sizes]]:
        """Return dtype and shape of tensors by name."""
        return {name: (e.dtype, e.shape) for name, e in self.contents.tensors.items()}

    def values(self) -> Iterable[str]:
        """Return the names of values that are not tensors."""
        return self.contents.values.keys()

    def value(self, name: str) -> Any:
        """Read a value that is not a tensor.

        Raises:
            ConfigError: if it has anything but plain values.
            Damaged: if it is malformed.
        """
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

    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Read a tensor, or a block of it; copy it, do not modify it.

        Raises:
            ConfigError: if it is not a plain tensor.
            Damaged: if it is not the one that was saved.
        """
        entry = self.contents.tensors[name]
        sizes = entry.shape if sizes is None else tuple(sizes)
        offsets = (0,) * len(sizes) if offsets is None else tuple(offsets)

        def block(chunk: Chunk, at: Sizes, shape: Sizes) -> Tensor:
            layout = self._layout(name, chunk)
            place = layout.file, layout.begin
            return self._files.block(place, layout.dtype, layout.strides, at, shape)

        where = f"{self.folder}: {name}"
        return assemble(entry.dtype, offsets, sizes, entry.chunks, block, where)

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

    def _verify_item(
        self, name: str, item: Item | TensorLayout, chunk: Chunk | None = None
    ) -> str | None:
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


INFO, INDEX = "DCP_SHARDING_INFO", "model.safetensors.index.json"


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
    """Read the contents of the files, verified to be within them.

    Raises:
        Damaged: if a header is malformed, or blocks of a tensor are missing.
        ConfigError: if a tensor has a dtype that is not supported.
    """
    files, found = files_in(folder), dict[str, list[Chunk]]()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            for name, chunk in _chunks(path, files):
                found.setdefault(name, []).append(chunk)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise Damaged(f"{path}: damaged: its header is invalid: {error}") from None
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
        raise Damaged(
            f"{folder}: a file is missing, or belongs to another checkpoint: {name}: {problem}"
        )
    return TensorEntry(layouts[0].dtype, shape, tuple(chunks))


def _chunks(path: Path, files: Files) -> Iterator[tuple[str, Chunk]]:
    header = read_header(path, files)
    sharding = json.loads(header.metadata.get(INFO, "null"))
    for name, stored in header.tensors.items():
        if stored.dtype is None:
            raise ConfigError(f"{path}: {name}: dtype {stored.code} is not supported")
        strides = contiguous(stored.shape)
        layout = TensorLayout(path.name, stored.dtype, stored.shape, strides, stored.begin)
        offsets = sharding[name]["saved_offsets"] if sharding else [0] * len(stored.shape)
        yield name, Chunk(sizes(offsets), stored.shape, layout)
