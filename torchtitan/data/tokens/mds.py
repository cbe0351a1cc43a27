"""MosaicML streaming's MDS: `index.json`, and shards of samples with columns.

shard     u32 n, u32[n + 1] first byte of each sample and the end, JSON of the columns, samples
sample    u32 size of each column that has no fixed size, then the columns
ndarray   code of the dtype, unless it is in the encoding; code of the shape; shape; values
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchtitan.config import ConfigError
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.tokens.formats import (
    Bytes,
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

CODES = {8 * np.dtype(name).itemsize + (name[0] == "i"): name for name in DTYPES}
"""Dtypes by the code in front of an array: its bits, and 1 more if it has signs."""
SHAPES = ("<u1", "<u2", "<u4", "<u8")
"""Dtypes of the shape of an array, by code."""
VECTOR = 1 << 2
"""Code of a shape with one axis, to which the code of its dtype is added."""
HASH = "xxh3_64"


class MosaicFormat(TokenFormat):
    """MosaicML streaming's MDS: a folder with `index.json`."""

    name: str = "mds"
    """Name of the format."""
    column: str = "tokens"
    """Column of the tokens."""
    dtype: Literal["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"] = (
        "int64"
    )
    """Dtype of the tokens, if the column has bytes."""

    def files(self, path: Path) -> list[Path]:
        return indices(path, "column_encodings")

    def tables(self, path: Path, tokenizer: Tokenizer) -> Iterator[ShardTable]:
        for file, entry in self._shards(path):
            content = contents(file)
            dtype, starts, lengths = _Samples(file, content, entry, self).tokens()
            yield shard_table(root_of(path), file, dtype, starts, lengths)

    def digests(self, path: Path) -> Iterator[tuple[Path, Mapping[str, str]]]:
        for file, entry in self._shards(path):
            yield file, entry["raw_data"]["hashes"]

    def _shards(self, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
        for index in self.files(path):
            try:
                found = [
                    (index.parent / entry["raw_data"]["basename"], entry)
                    for entry in read_json(index)["shards"]
                ]
            except (KeyError, TypeError) as error:
                raise ConfigError(f"{index}: not an index of MDS: {error!r}") from None
            for file, entry in found:
                if entry.get("zip_data") and not file.is_file():
                    raise ConfigError(
                        f"{file.parent / entry['zip_data']['basename']}: a compressed shard; "
                        f"decompress all of them next to it, {file.name} for this one (zstd -d)"
                    )
                yield file, entry


class _Samples:
    """Samples of a shard, whose structure is verified."""

    def __init__(
        self, file: Path, content: Bytes, entry: Mapping[str, Any], settings: MosaicFormat
    ) -> None:
        self.file, self.content, self.settings = file, content, settings
        try:
            size, count = entry["raw_data"]["bytes"], entry["samples"]
            names, encodings = entry["column_names"], entry["column_encodings"]
            self.columns = list(zip(names, encodings, entry["column_sizes"], strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{file}: its entry in {INDEX} is incomplete: {error!r}") from None
        if len(content) != size:
            message = f"it has {len(content):,} bytes, and {INDEX} says {size:,}"
            raise damaged(file, min(len(content), size), message)
        header, ends = read_offsets(file, content, count, "samples")
        self.starts, self.sizes = ends[:-1], np.diff(ends)
        try:
            said = json.loads(bytes(content[header : ends[0]]))
            agrees = said["column_names"] == names and said["column_encodings"] == encodings
        except (ValueError, KeyError, TypeError):
            agrees = False
        if not agrees:
            raise damaged(file, header, f"its columns are not those that {INDEX} says")

    def tokens(self) -> tuple[str, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the dtype of the tokens, and the first byte and length of each document."""
        encoding, starts, sizes = self._column()
        kind, _, rest = encoding.partition(":")
        dtype, _, shape = rest.partition(":")
        if kind == "bytes":
            dtype = self.settings.dtype
        elif not shape:
            if not dtype:
                dtype, starts, sizes = self._dtype(starts, sizes)
            starts, sizes = self._values(starts, sizes, np.dtype(dtype).itemsize)
        itemsize = np.dtype(dtype).itemsize
        if (wrong := first(sizes % itemsize != 0)) is not None:
            message = f"{sizes[wrong]:,} bytes of tokens are no multiple of {itemsize}, a {dtype}"
            raise damaged(self.file, int(starts[wrong]), message)
        return dtype, starts, sizes // itemsize

    def _column(self) -> tuple[str, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the encoding of the tokens, and the first byte and bytes of each document."""
        name = self.settings.column
        encodings = {name: encoding for name, encoding, _ in self.columns}
        if name not in encodings:
            raise ConfigError(
                f"{self.file}: no column {name}; set `column` to one of {', '.join(encodings)}"
            )
        kind, _, rest = encodings[name].partition(":")
        if kind == "pkl":
            raise ConfigError(
                f"{self.file}: the column {name} is pickled, which could run code; write it as "
                "ndarray:int32"
            )
        if kind not in ("bytes", "ndarray") or rest.partition(":")[0] not in ("", *DTYPES):
            raise ConfigError(
                f"{self.file}: the column {name} has the encoding {encodings[name]}; wanted "
                "bytes, or an ndarray of integers"
            )
        heads = 4 * sum(size is None for _, _, size in self.columns)
        if (wrong := first(self.sizes < heads)) is not None:
            raise damaged(self.file, int(self.starts[wrong]), f"sample {wrong} is truncated")
        at, place = self.starts, self.starts + heads
        found = place, self.sizes
        for column, _, fixed in self.columns:
            size = np.full(len(place), fixed or 0, np.int64)
            if fixed is None:
                size, at = gather(self.content, at, "<u4").astype(np.int64), at + 4
            if column == name:
                found = place, size
            place = place + size
        if (wrong := first(place != self.starts + self.sizes)) is not None:
            message = f"sample {wrong} has columns of {place[wrong] - self.starts[wrong]:,} bytes"
            raise damaged(
                self.file, int(self.starts[wrong]), f"{message}, and {self.sizes[wrong]:,} in all"
            )
        return encodings[name], *found

    def _dtype(
        self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
    ) -> tuple[str, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the dtype that each document has, and what follows it."""
        codes = self._codes(starts, sizes)
        code = int(codes[0]) if len(codes) else 33
        if code not in CODES:
            raise damaged(self.file, int(starts[0]), f"no dtype of integers has the code {code}")
        if (wrong := first(codes != code)) is not None:
            said = CODES.get(int(codes[wrong]), f"code {codes[wrong]}")
            message = f"sample {wrong} has the dtype {said}, and those before it {CODES[code]}"
            raise damaged(self.file, int(starts[wrong]), message)
        return CODES[code], starts + 1, sizes - 1

    def _codes(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Any:
        if (wrong := first(sizes < 1)) is not None:
            raise damaged(self.file, int(starts[wrong]), f"sample {wrong} has no array")
        return gather(self.content, starts, "<u1")

    def _values(
        self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], itemsize: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the first byte and bytes of the values of each document, after their shape."""
        codes = self._codes(starts, sizes).astype(np.int64) - VECTOR
        if (wrong := first((codes < 0) | (codes >= len(SHAPES)))) is not None:
            message = f"sample {wrong} is not an array with one axis"
            raise damaged(self.file, int(starts[wrong]), message)
        heads = 1 + (1 << codes)
        for code, kind in enumerate(SHAPES):
            (same,) = np.nonzero((codes == code) & (sizes >= heads))
            counts = gather(self.content, starts[same] + 1, kind).astype(np.int64)
            heads[same[counts * itemsize != (sizes - heads)[same]]] = 0
        if (wrong := first((heads == 0) | (sizes < heads))) is not None:
            message = f"sample {wrong} has another length than its {sizes[wrong]:,} bytes"
            raise damaged(self.file, int(starts[wrong]), message)
        return starts + heads, sizes - heads
