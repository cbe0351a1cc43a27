"""Shards of tokens that other libraries write: Megatron, datatrove, MosaicML streaming, litdata.

Megatron's indexed data sets

    .idx  0   9 bytes  MMIDIDX\\0\\0
          9   u64      version, 1
          17  u8       code of the tokens' dtype
          18  u64      S, the number of sequences
          26  u64      D, the number of documents + 1
          34  i32[S]   tokens of each sequence
              i64[S]   first byte of each sequence
              i64[D]   first sequence of each document, and S
    .bin               tokens

datatrove's `.ds`, as nanotron reads them

    X.ds           tokens, of 2 or 4 bytes
    X.ds.index     u64 end of each document, in tokens
    X.ds.metadata  tokenizer|bytes of a token, and the number of tokens, a line each (optional)
    X.ds.loss      whether each token counts in the loss (optional; not used)

MosaicML streaming's MDS: `index.json`, and shards of samples with columns

    shard    u32 n, u32[n + 1] first byte of each sample and the end, JSON of the columns, samples
    sample   u32 size of each column that has no fixed size, then the columns
    ndarray  code of the dtype, unless it is in the encoding; code of the shape; shape; values

litdata's chunks: `index.json`, and chunks of tensors without headers. An item of `TokensLoader` is
its tokens; one of other loaders has its u32 size before them.

    chunk    u32 n, u32[n + 1] first byte of each item and the end, items
"""

import json
import struct
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
    array,
    contents,
    damaged,
    find,
    first,
    gather,
    in_its_case,
    indices,
    read_json,
    read_offsets,
    root_of,
    shard_table,
    size_of,
    unpack,
)
from torchtitan.data.tokens.index import DTYPES, INDEX, ShardTable
from torchtitan.logging import logger

MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_HEADER = "<9sQBQQ"
HEADER_BYTES = struct.calcsize(MEGATRON_HEADER)
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class MegatronFormat(TokenFormat):
    """Megatron's `.bin` and `.idx`; the path is an `.idx`, or a folder of them."""

    name: str = "megatron"
    """Name of the format."""

    def files(self, path: Path) -> list[Path]:
        return find(path, ".idx")

    def tables(self, path: Path, tokenizer: Tokenizer) -> Iterator[ShardTable]:
        for file in self.files(path):
            yield _megatron_table(root_of(path), file)


def _megatron_table(root: Path, file: Path) -> ShardTable:
    content = contents(file)
    magic, version, code, sequences, count = unpack(file, content, MEGATRON_HEADER)
    if magic != MEGATRON_MAGIC:
        raise damaged(file, 0, "not an index of Megatron, which starts with MMIDIDX")
    if version != 1:
        raise damaged(file, 9, f"version {version}; only 1 is known")
    if code not in MEGATRON_DTYPES:
        message = f"no dtype of tokens has the code {code}; the codes are {[*MEGATRON_DTYPES]}"
        raise damaged(file, 17, message)
    size = HEADER_BYTES + 12 * sequences + 8 * count
    if sequences and len(content) == size + sequences:
        raise ConfigError(f"{file}: multimodal sequences; only text can be read")
    if len(content) != size:
        message = f"it has {len(content):,} bytes, but its header is that of {size:,}"
        raise damaged(file, min(len(content), size), message)

    at_pointers, at_documents = HEADER_BYTES + 4 * sequences, HEADER_BYTES + 12 * sequences
    lengths = array(content, "<i4", sequences, HEADER_BYTES)
    pointers = array(content, "<i8", sequences, at_pointers)
    documents = array(content, "<i8", count, at_documents)
    if (wrong := first(lengths < 0)) is not None:
        message = f"sequence {wrong} has a length of {lengths[wrong]}"
        raise damaged(file, HEADER_BYTES + 4 * wrong, message)
    tokens = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    itemsize = np.dtype(MEGATRON_DTYPES[code]).itemsize
    if (wrong := first(pointers != tokens[:-1] * itemsize)) is not None:
        message = (
            f"sequence {wrong} starts at byte {pointers[wrong]:,} of the .bin; the sequences "
            f"before it end at {tokens[wrong] * itemsize:,}"
        )
        raise damaged(file, at_pointers + 8 * wrong, message)
    steps = np.diff(documents, prepend=0, append=sequences)
    if not count or documents[0] or documents[-1] != sequences or (steps < 0).any():
        wrong = first(steps < 0) or (0 if count and documents[0] else count - 1)
        message = f"the documents do not divide the {sequences:,} sequences in order"
        raise damaged(file, at_documents + 8 * min(wrong, count - 1), message)

    shard = in_its_case(file.with_suffix(".bin"))
    found = size_of(shard)
    if found != (wanted := int(tokens[-1]) * itemsize):
        message = f"it has {found:,} bytes, and {file.name} has documents of {wanted:,}"
        raise damaged(shard, min(found, wanted), message)
    ends = tokens[documents]
    return shard_table(root, shard, MEGATRON_DTYPES[code], ends[:-1] * itemsize, np.diff(ends))


DATATROVE_DTYPES = {2: "uint16", 4: "uint32"}


class DatatroveFormat(TokenFormat):
    """datatrove's `.ds` with `.ds.index`; the path is a `.ds`, or a folder of them."""

    name: str = "datatrove"
    """Name of the format."""

    def files(self, path: Path) -> list[Path]:
        pairs = ((file, _beside(file, ".index")) for file in find(path, ".ds"))
        return [index if index.is_file() else file for file, index in pairs]

    def tables(self, path: Path, tokenizer: Tokenizer) -> Iterator[ShardTable]:
        shards = find(path, ".ds")
        if masks := [file for file in shards if _beside(file, ".loss").is_file()]:
            logger.info("data: loss masks are ignored: %s.loss and others", masks[0])
        for file in shards:
            yield _datatrove_table(root_of(path), file)


def _beside(file: Path, suffix: str) -> Path:
    return in_its_case(file.with_name(file.name + suffix))


def _datatrove_table(root: Path, file: Path) -> ShardTable:
    index = _beside(file, ".index")
    if not index.is_file():
        raise ConfigError(
            f"{index}: it is missing, so the documents are unknown; restore it, or read "
            f'{file.name} by the token that ends documents (format "raw", suffix ".ds")'
        )
    size, content = size_of(file), contents(index)
    if len(content) % 8 or not len(content):
        message = "truncated: wanted at least one number of 8 bytes, and only such"
        raise damaged(index, len(content), message)
    ends = array(content, "<u8", len(content) // 8, 0).astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    if (wrong := first(lengths < 0)) is not None:
        message = f"document {wrong} ends at token {ends[wrong]:,}, before it starts"
        raise damaged(index, 8 * wrong, message)
    tokens = int(ends[-1])
    itemsize = size // tokens if tokens else 0
    if itemsize not in DATATROVE_DTYPES or size != itemsize * tokens:
        message = (
            f"the last document ends at token {tokens:,}, and {file.name} has {size:,} bytes; "
            "wanted 2 or 4 for each token"
        )
        raise damaged(index, len(content) - 8, message)
    metadata = _beside(file, ".metadata")
    if metadata.is_file():
        lines = metadata.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [lines[0].rpartition("|")[2], *lines[1:2]]
        if said != [str(itemsize), str(tokens)]:
            raise ConfigError(
                f"{metadata}: says {' bytes a token, and '.join(said)} tokens; {file.name} has "
                f"{itemsize} and {tokens}"
            )
    dtype = DATATROVE_DTYPES[itemsize]
    return shard_table(root, file, dtype, (ends - lengths) * itemsize, lengths)


MDS_DTYPES = {8 * np.dtype(name).itemsize + (name[0] == "i"): name for name in DTYPES}
"""Dtypes by the code in front of an array: its bits, and 1 more if it has signs."""
MDS_SHAPES = ("<u1", "<u2", "<u4", "<u8")
"""Dtypes of the shape of an array, by code."""
MDS_VECTOR = 1 << 2
"""Code of a shape with one axis, to which the code of its dtype is added."""


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
            dtype, starts, lengths = _MosaicShard(file, content, entry, self).tokens()
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


class _MosaicShard:
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
        if code not in MDS_DTYPES:
            raise damaged(self.file, int(starts[0]), f"no dtype of integers has the code {code}")
        if (wrong := first(codes != code)) is not None:
            said = MDS_DTYPES.get(int(codes[wrong]), f"code {codes[wrong]}")
            message = f"sample {wrong} has the dtype {said}, and those before it {MDS_DTYPES[code]}"
            raise damaged(self.file, int(starts[wrong]), message)
        return MDS_DTYPES[code], starts + 1, sizes - 1

    def _codes(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Any:
        if (wrong := first(sizes < 1)) is not None:
            raise damaged(self.file, int(starts[wrong]), f"sample {wrong} has no array")
        return gather(self.content, starts, "<u1")

    def _values(
        self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], itemsize: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the first byte and bytes of the values of each document, after their shape."""
        codes = self._codes(starts, sizes).astype(np.int64) - MDS_VECTOR
        if (wrong := first((codes < 0) | (codes >= len(MDS_SHAPES)))) is not None:
            message = f"sample {wrong} is not an array with one axis"
            raise damaged(self.file, int(starts[wrong]), message)
        heads = 1 + (1 << codes)
        for code, kind in enumerate(MDS_SHAPES):
            (same,) = np.nonzero((codes == code) & (sizes >= heads))
            counts = gather(self.content, starts[same] + 1, kind).astype(np.int64)
            heads[same[counts * itemsize != (sizes - heads)[same]]] = 0
        if (wrong := first((heads == 0) | (sizes < heads))) is not None:
            message = f"sample {wrong} has another length than its {sizes[wrong]:,} bytes"
            raise damaged(self.file, int(starts[wrong]), message)
        return starts + heads, sizes - heads


TORCH_DTYPES = {11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32"}
TORCH_DTYPES |= {17: "int64", 18: "int64", 20: "uint16"}
"""Dtypes by litdata's code, for tensors of torch."""
NUMPY_DTYPES = dict(enumerate((*DTYPES[4:], *DTYPES[:4])))
"""Dtypes by litdata's code, for arrays of NumPy."""
LITDATA_DTYPES = {"no_header_tensor": TORCH_DTYPES, "no_header_numpy": NUMPY_DTYPES}


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
                dtype = _litdata_dtype(index, config)
                found = [
                    (index.parent / each["filename"], each["chunk_size"], each["dim"])
                    for each in chunks
                ]
            except (KeyError, TypeError) as error:
                raise ConfigError(f"{index}: not an index of litdata: {error!r}") from None
            for file, items, tokens in found:
                yield _litdata_table(root_of(path), file, dtype, items, tokens)


def _litdata_dtype(index: Path, config: Mapping[str, Any]) -> str:
    for key in ("compression", "encryption"):
        if config.get(key):
            raise ConfigError(f"{index}: {key} {config[key]}; write the chunks without it")
    kind, _, code = ",".join(config["data_format"]).partition(":")
    dtype = (
        LITDATA_DTYPES[kind].get(int(code)) if kind in LITDATA_DTYPES and code.isdecimal() else None
    )
    if dtype is None:
        raise ConfigError(
            f"{index}: items of {', '.join(config['data_format'])}; wanted one tensor of integers "
            f"with one axis, {' or '.join(LITDATA_DTYPES)}"
        )
    return dtype


def _litdata_table(
    root: Path, file: Path, dtype: str, items: int, tokens: int | None
) -> ShardTable:
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
