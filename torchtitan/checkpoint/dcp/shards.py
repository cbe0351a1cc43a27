"""Safetensors that DCP's `HuggingFaceStorageWriter` wrote: blocks of tensors, or whole ones.

The header of such a file is JSON, with the first byte and the last of each tensor. Where a file has
blocks, `DCP_SHARDING_INFO` says at which offset in the whole tensor each of them is.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.dcp.items import Layout
from torchtitan.checkpoint.dcp.metadata import Chunk, Contents, Entry, problem_of_chunks
from torchtitan.checkpoint.manifest import Damaged
from torchtitan.checkpoint.ranges import Files, files_in
from torchtitan.checkpoint.storage import CODES, Sizes
from torchtitan.config import ConfigError

INFO, INDEX = "DCP_SHARDING_INFO", "model.safetensors.index.json"
LONGEST = 100 * 10**6
"""Bytes of a header, as the safetensors library has it."""
DTYPES = {code: dtype for dtype, code in CODES.items()}


def find_shards(checkpoint: Path) -> Path | None:
    """The folder of the files, if there are some.

    Whole tensors are put together from those in `sharded`; the index is written when they are.
    """
    sharded = checkpoint / "sharded"
    has_whole = any(checkpoint.glob("*.safetensors"))
    if any(sharded.glob("*.safetensors")) and not (has_whole and (checkpoint / INDEX).exists()):
        return sharded
    return checkpoint if has_whole else None


def read_shards(folder: Path) -> Contents:
    """What the files have, known to be within them.

    Raises:
        Damaged: where a header makes no sense, or blocks of a tensor are missing.
        ConfigError: where a tensor has a dtype that is not supported.
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


def _entry(folder: Path, name: str, chunks: list[Chunk]) -> Entry:
    layouts = [chunk.place for chunk in chunks if isinstance(chunk.place, Layout)]
    if len({(layout.dtype, len(layout.shape)) for layout in layouts}) > 1:
        raise Damaged(f"{folder}: damaged: {name} is not the same tensor in all files")
    ends = [
        [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks
    ]
    shape = tuple(max(column) for column in zip(*ends, strict=True))
    if problem := problem_of_chunks(shape, chunks):
        raise Damaged(f"{folder}: a file is missing, or of another checkpoint: {name}: {problem}")
    return Entry(layouts[0].dtype, shape, tuple(chunks))


def _chunks(path: Path, files: Files) -> Iterator[tuple[str, Chunk]]:
    size = files.size(path.name)
    length = int.from_bytes(files.read(path.name, 0, 8), "little") if size >= 8 else size
    if length > min(size - 8, LONGEST):
        raise Damaged(f"{path}: cut: it has {size:,} bytes, and its header alone {length:,}")
    header = json.loads(bytes(files.read(path.name, 8, 8 + length)))
    sharding = json.loads(header.pop("__metadata__", {}).get(INFO, "null"))
    for name, about in header.items():
        layout = _layout(path, name, about, 8 + length, size)
        offsets = sharding[name]["saved_offsets"] if sharding else [0] * len(layout.shape)
        yield name, Chunk(_sizes(offsets), layout.shape, layout)


def _layout(path: Path, name: str, about: dict[str, Any], data: int, size: int) -> Layout:
    shape, (begin, end) = _sizes(about["shape"]), _sizes(about["data_offsets"])
    if about["dtype"] not in DTYPES:
        raise ConfigError(f"{path}: {name}: dtype {about['dtype']} is not supported")
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    layout = Layout(path.name, DTYPES[about["dtype"]], shape, strides, data + begin)
    if end - begin != layout.length:
        raise ValueError(f"{name} has {end - begin:,} bytes")
    if data + end > size:
        raise Damaged(f"{path}: cut: it has {size:,} bytes, and {name} ends at {data + end:,}")
    return layout


def _sizes(value: Any) -> Sizes:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"found {value!r:.80} in place of sizes")
    return tuple(value)
