"""litdata's chunks of tokens: `index.json`, and chunks of tensors without headers.

    chunk  u32 n, u32[n + 1] first byte of each item and the end, items

An item of `TokensLoader` is its tokens; one of other loaders has its u32 size before them.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from torchtitan.config import ConfigError
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.tokens.formats import TokenFormat, Tokens, root_of
from torchtitan.data.tokens.index import DTYPES, INDEX, ShardTable
from torchtitan.data.tokens.shard_files import (
    contents,
    damaged,
    first,
    gather,
    indices,
    read_json,
    read_offsets,
    shard_table,
)

TORCH = {11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32"}
TORCH |= {17: "int64", 18: "int64", 20: "uint16"}
"""Dtypes by litdata's code, for tensors of torch."""
NUMPY = dict(enumerate((*DTYPES[4:], *DTYPES[:4])))
"""Dtypes by litdata's code, for arrays of NumPy."""
CODES = {"no_header_tensor": TORCH, "no_header_numpy": NUMPY}


class LitDataFormat(TokenFormat):
    """litdata's chunks of tokens: a folder with `index.json`."""

    name: str = "litdata"
    """Name of the format."""

    dtypes: ClassVar[Sequence[str]] = ("uint16", "int32", "uint8", "int8", "int16", "int64")
    shard_bytes: ClassVar[int] = 2**26

    def files(self, path: Path) -> list[Path]:
        return indices(path, "chunk_bytes")

    def tables(self, path: Path, tokenizer: Tokenizer) -> Iterator[ShardTable]:
        for index in self.files(path):
            try:
                about = read_json(index)
                config, chunks = about["config"], about["chunks"]
                dtype = _dtype(index, config)
                found = [
                    (index.parent / each["filename"], each["chunk_size"], each["dim"])
                    for each in chunks
                ]
            except (KeyError, TypeError) as error:
                raise ConfigError(f"{index}: not an index of litdata: {error!r}") from None
            for file, items, tokens in found:
                yield _table(root_of(path), file, dtype, items, tokens)

    def write(
        self, folder: Path, number: int, dtype: str, documents: Iterable[Tokens]
    ) -> tuple[str, dict[str, Any]]:
        items = [tokens.tobytes() for tokens in documents]
        offsets = np.cumsum([4 * (len(items) + 2), *map(len, items)], dtype=np.int64)
        if offsets[-1] >= 2**32:
            raise ConfigError(f"{folder}: a chunk of litdata is smaller than 4 GiB; write more")
        file = folder / f"chunk-0-{number}.bin"
        with file.open("wb") as stream:
            stream.write(struct.pack("<I", len(items)))
            stream.write(offsets.astype("<u4").tobytes())
            stream.writelines(items)
        return dtype, {
            "chunk_bytes": int(offsets[-1]),
            "chunk_size": len(items),
            "dim": sum(map(len, items)) // np.dtype(dtype).itemsize,
            "filename": file.name,
        }

    def finish(self, folder: Path, entries: Sequence[Any], about: Mapping[str, Any]) -> None:
        code = max(code for code, dtype in TORCH.items() if dtype == entries[0][0])
        leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
        config = {
            "chunk_bytes": self.shard_bytes,
            "chunk_size": None,
            "compression": None,
            "data_format": [f"no_header_tensor:{code}"],
            "data_spec": json.dumps([1, leaf]),
            "encryption": None,
            "item_loader": "TokensLoader",
        }
        index = {"chunks": [entry for _, entry in entries], "config": config}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _dtype(index: Path, config: Mapping[str, Any]) -> str:
    for key in ("compression", "encryption"):
        if config.get(key):
            raise ConfigError(f"{index}: {key} {config[key]}; write the chunks without it")
    kind, _, code = ",".join(config["data_format"]).partition(":")
    dtype = CODES[kind].get(int(code)) if kind in CODES and code.isdecimal() else None
    if dtype is None:
        raise ConfigError(
            f"{index}: items of {', '.join(config['data_format'])}; wanted one tensor of integers "
            f"with one axis, {' or '.join(CODES)}"
        )
    return dtype


def _table(root: Path, file: Path, dtype: str, items: int, tokens: int | None) -> ShardTable:
    content = contents(file)
    header, ends = read_offsets(file, content, items, "items")
    if ends[0] != header:
        raise damaged(file, 4, f"the items do not divide its {len(content):,} bytes in order")
    starts, sizes = ends[:-1], np.diff(ends)
    if tokens is None:
        if (wrong := first(sizes < 4)) is not None:
            raise damaged(file, int(starts[wrong]), f"item {wrong} is truncated")
        said = gather(content, starts, "<u4")
        starts, sizes = starts + 4, sizes - 4
        if (wrong := first(said != sizes)) is not None:
            message = f"item {wrong} has {sizes[wrong]:,} bytes, and says {said[wrong]:,}"
            raise damaged(file, int(starts[wrong]) - 4, message)
    itemsize = np.dtype(dtype).itemsize
    if (wrong := first(sizes % itemsize != 0)) is not None:
        message = f"item {wrong} has {sizes[wrong]:,} bytes, no multiple of {itemsize}, a {dtype}"
        raise damaged(file, int(starts[wrong]), message)
    if tokens is not None and (found := int(sizes.sum()) // itemsize) != tokens:
        raise damaged(file, 4, f"its items have {found:,} tokens, and {INDEX} says {tokens:,}")
    return shard_table(root, file, dtype, starts, sizes // itemsize)
