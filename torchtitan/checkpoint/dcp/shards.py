"""Safetensors written by DCP's `HuggingFaceStorageWriter`: blocks of tensors, or whole ones.

If a file has blocks, `DCP_SHARDING_INFO` in its header has their offsets in the whole tensor.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from torchtitan.checkpoint.dcp.items import TensorLayout
from torchtitan.checkpoint.dcp.metadata import Chunk, Contents, TensorEntry, problem_of_chunks
from torchtitan.checkpoint.headers import read_header, sizes
from torchtitan.checkpoint.manifest import Damaged
from torchtitan.checkpoint.ranges import Files, contiguous, files_in
from torchtitan.config import ConfigError

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
            raise Damaged(f"{path}: damaged: its header makes no sense: {error}") from None
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
        raise Damaged(f"{folder}: a file is missing, or of another checkpoint: {name}: {problem}")
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
