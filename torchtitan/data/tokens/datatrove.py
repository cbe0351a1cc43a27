"""datatrove's `.ds`, as nanotron reads them.

X.ds           tokens, of 2 or 4 bytes
X.ds.index     u64 end of each document, in tokens
X.ds.metadata  tokenizer|bytes of a token, and the number of tokens, a line each (optional)
X.ds.loss      whether each token counts in the loss (optional; not used)
"""

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
)
from torchtitan.data.tokens.index import ShardTable
from torchtitan.logging import logger

DTYPES_BY_BYTES = {2: "uint16", 4: "uint32"}


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
            logger.info("data: %s.loss and others mask tokens of the loss; not used", masks[0])
        for file in shards:
            yield _table(root_of(path), file)


def _beside(file: Path, suffix: str) -> Path:
    return in_its_case(file.with_name(file.name + suffix))


def _table(root: Path, file: Path) -> ShardTable:
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
    if itemsize not in DTYPES_BY_BYTES or size != itemsize * tokens:
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
    dtype = DTYPES_BY_BYTES[itemsize]
    return shard_table(root, file, dtype, (ends - lengths) * itemsize, lengths)
