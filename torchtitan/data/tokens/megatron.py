"""Megatron's indexed data sets: `.bin` with tokens, `.idx` with sequences and documents.

.idx  0   9 bytes  MMIDIDX\\0\\0
      9   u64      version, 1
      17  u8       code of the tokens' dtype
      18  u64      S, the number of sequences
      26  u64      D, the number of documents + 1
      34  i32[S]   tokens of each sequence
          i64[S]   first byte of each sequence
          i64[D]   first sequence of each document, and S
.bin               tokens
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from torchtitan.config import ConfigError
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.tokens.formats import (
    TokenFormat,
    array,
    contents,
    damaged,
    find,
    first,
    in_its_case,
    root_of,
    shard_table,
    size_of,
    unpack,
)
from torchtitan.data.tokens.index import ShardTable

MAGIC = b"MMIDIDX\0\0"
HEADER = "<9sQBQQ"
HEADER_BYTES = struct.calcsize(HEADER)
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class MegatronFormat(TokenFormat):
    """Megatron's `.bin` and `.idx`; the path is an `.idx`, or a folder of them."""

    name: str = "megatron"
    """Name of the format."""

    def files(self, path: Path) -> list[Path]:
        return find(path, ".idx")

    def tables(self, path: Path, tokenizer: Tokenizer) -> Iterator[ShardTable]:
        for file in self.files(path):
            yield _table(root_of(path), file)


def _table(root: Path, file: Path) -> ShardTable:
    content = contents(file)
    magic, version, code, sequences, count = unpack(file, content, HEADER)
    if magic != MAGIC:
        raise damaged(file, 0, "not an index of Megatron, which starts with MMIDIDX")
    if version != 1:
        raise damaged(file, 9, f"version {version}; only 1 is known")
    if code not in CODES:
        message = f"no dtype of tokens has the code {code}; the codes are {[*CODES]}"
        raise damaged(file, 17, message)
    size = HEADER_BYTES + 12 * sequences + 8 * count
    if len(content) == size + sequences:
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
    itemsize = np.dtype(CODES[code]).itemsize
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
    return shard_table(root, shard, CODES[code], ends[:-1] * itemsize, np.diff(ends))
