"""Raw tokens without a header, as nanoGPT, OLMo and dolma write them, also in files named `.npy`.

A document ends with the token `end`; or `X.csv.gz` next to `X.npy` has its first token and its end
in each line. A real `.npy`, and a file of llm.c, are read by the header that they start with.
"""

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field

from torchtitan.config import ConfigError
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.tokens.formats import (
    TokenFormat,
    damaged,
    find,
    first,
    in_its_case,
    root_of,
    shard_table,
)
from torchtitan.data.tokens.index import ShardTable
from torchtitan.logging import logger
from torchtitan.remote import refuse_pointer

UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
BLOCK = 2**22
"""Tokens that are read at a time."""
LLM_C_DTYPES = {
    np.array([magic, version], "<i4").tobytes(): dtype
    for magic, version, dtype in ((20240520, 1, "uint16"), (20240801, 7, "uint32"))
}
"""Dtype by the start of the header that llm.c writes, for the tokenizers of GPT-2 and Llama 3."""
MAGIC = b"\x93NUMPY"


class RawFormat(TokenFormat):
    """Tokens without a header, as in the `.npy` of OLMo and dolma."""

    name: str = "raw"
    """Name of the format."""
    suffix: str = Field(".npy", min_length=2)
    """Suffix of the files in a folder."""
    dtype: Literal["uint8", "uint16", "uint32", "uint64"] | None = None
    """Dtype of the tokens. Default: the smallest for the tokenizer's vocabulary."""
    end: int | None = Field(None, ge=0)
    """Token that ends a document. Default: the tokenizer's EOS token, if there is one."""

    def files(self, path: Path) -> list[Path]:
        return find(path, self.suffix)

    def resolved(self, tokenizer: Tokenizer) -> Self:
        fits = (name for name in UNSIGNED if tokenizer.vocab_size - 1 <= np.iinfo(name).max)
        end = tokenizer.eos if self.end is None else self.end
        return self.model_copy(update={"dtype": self.dtype or next(fits), "end": end})

    def tables(self, path: Path, tokenizer: Tokenizer) -> Iterator[ShardTable]:
        settings = self.resolved(tokenizer)
        for file in self.files(path):
            yield self._table(root_of(path), file, str(settings.dtype), settings.end)

    def _table(self, root: Path, file: Path, dtype: str, end: int | None) -> ShardTable:
        with file.open("rb") as stream:
            first_bytes = stream.read(12)
        header, rows, said = 0, None, None
        if header_dtype := LLM_C_DTYPES.get(first_bytes[:8]):
            if self.dtype and dtype != header_dtype:
                raise damaged(file, 0, f"its header says {header_dtype}, and the recipe {dtype}")
            header, dtype, said = 1024, header_dtype, int.from_bytes(first_bytes[8:], "little")
            logger.info("data: using the llm.c header of %s: %s", file, dtype)
        if first_bytes.startswith(MAGIC):
            array = _open_npy(file)
            if self.dtype and dtype != array.dtype.name:
                message = f"its header says {array.dtype}, and the recipe {dtype}; remove `dtype`"
                raise damaged(file, 0, message)
            header, dtype, rows, said = array.offset, array.dtype.name, array.shape, array.size
            logger.info("data: using the NumPy header of %s: %s %s", file, dtype, rows)
        itemsize = np.dtype(dtype).itemsize
        size = file.stat().st_size - header
        if size < 0 or (said is not None and size != said * itemsize):
            message = f"it has {max(0, size):,} bytes of tokens, and its header is that of "
            raise damaged(file, header, f"{message}{said:,} {dtype}; it is truncated, or damaged")
        if not size:
            raise damaged(file, header, "it has no tokens; remove it")
        if size % itemsize:
            message = f"{size:,} bytes are no multiple of {itemsize}, the bytes of {dtype}"
            raise damaged(file, header + size // itemsize * itemsize, message)
        spans = in_its_case(file.with_suffix(".csv.gz"))
        if rows is not None and len(rows) == 2:
            ends = np.arange(rows[0] + 1, dtype=np.int64) * rows[1]
            starts, ends = ends[:-1], ends[1:]
        elif spans.is_file():
            starts, ends = _read_spans(spans, size // itemsize, dtype)
        else:
            ends = _find_ends(file, header, dtype, end)
            starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        return shard_table(root, file, dtype, header + starts * itemsize, ends - starts)


def _open_npy(file: Path) -> Any:
    try:
        array = np.load(file, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise damaged(file, 0, f"a .npy that NumPy cannot map: {error}") from None
    kind = array.dtype
    if kind.kind not in "iu" or kind.newbyteorder("<") != kind:
        raise damaged(file, 0, f"a .npy of {kind.str}; wanted little-endian integers")
    if array.ndim not in (1, 2) or not array.flags.c_contiguous:
        message = f"a .npy of shape {array.shape}; wanted (tokens,), or (documents, tokens) in C"
        raise damaged(file, 0, message)
    return array


def _read_spans(
    file: Path, tokens: int, dtype: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Read the first token and the end of each document."""
    refuse_pointer(file)
    spans: list[tuple[int, int]] = []
    try:
        with gzip.open(file, "rt", encoding="utf-8", newline="") as lines:
            for row in csv.reader(lines):
                spans.append((int(row[0]), int(row[1])))
    except (ValueError, IndexError, OSError, EOFError, csv.Error) as error:
        message = f"wanted the start and end of a document, separated by a comma: {error}"
        raise ConfigError(f"{file}:{len(spans) + 1}: {message}") from None
    starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
    before = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    if (wrong := first((starts < before) | (ends < starts) | (ends > tokens))) is not None:
        raise ConfigError(
            f"{file}:{wrong + 1}: a document from token {starts[wrong]:,} to {ends[wrong]:,}; "
            f"wanted after {before[wrong]:,}, and within the {tokens:,} tokens of the file"
        )
    if not len(ends) or ends[-1] != tokens:
        raise ConfigError(
            f"{file}:{len(ends)}: the documents end at token {ends[-1] if len(ends) else 0:,}, and "
            f"the file has {tokens:,} of {dtype}; set `dtype` if they have another"
        )
    return starts, ends


def _find_ends(file: Path, header: int, dtype: str, end: int | None) -> npt.NDArray[np.int64]:
    """Find the end of each document, by the token that ends it."""
    if end is None:
        message = (
            'nothing says where documents end; set data.format.name = "raw" and `end` to the token '
            "that ends a document"
        )
        raise damaged(file, header, message)
    found: list[npt.NDArray[np.int64]] = []
    count = 0
    kind = np.dtype(dtype).newbyteorder("<")
    with file.open("rb") as stream:
        stream.seek(header)
        while block := stream.read(BLOCK * kind.itemsize):
            tokens = np.frombuffer(block, kind)
            if not count and len(tokens) > 32 and tokens.any() and not tokens[1::2].any():
                message = f"every second {dtype} is 0, as in wider integers; set `dtype`"
                raise damaged(file, header, message)
            found.append(np.flatnonzero(tokens == end) + count + 1)
            count += len(tokens)
    ends = np.concatenate(found)
    if not len(ends):
        raise damaged(
            file,
            header,
            f"no document ends: none of its {count:,} tokens ({dtype}) is {end}; set `end` to the "
            "token that ends a document, and `dtype` if the tokens have another",
        )
    return ends if ends[-1] == count else np.append(ends, count)
