"""litdata's chunks of tokens: `index.json`, and chunks of tensors without headers.

    chunk  u32 n, u32[n + 1] first byte of each item and the end, items

An item of `TokensLoader` is its tokens; one of other loaders has its u32 size before them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.config import ConfigError
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.tokens.formats import (
    TokenFormat,
    contents,
    damaged,
    first,
    gather,
    indices,
    read_json,
    read_offsets,
    root_of,
    shard_table,
)
from torchtitan.data.tokens.index import DTYPES, INDEX, ShardTable

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
