"""Compressed JSON Lines, read in order: each file is a shard of a stream.

gzip is decompressed by Python, zstd by Arrow. Truncated and invalid files are reported by name when
read.
"""

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigError
from torchtitan.data.documents import NullText, text_of

MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
"""First bytes of a file, by its suffix."""


@dataclass(frozen=True)
class CompressedLines:
    """Compressed files in the interface that `StreamedDocuments` reads."""

    files: Sequence[Path]
    text_key: str
    first: int = 0
    """First row to read."""
    column_names: None = None
    """Column names; None because lines may differ in their keys."""

    @property
    def num_shards(self) -> int:
        """Number of shards, one per file."""
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> "CompressedLines":
        """Return the shard `index`, one of the files."""
        return CompressedLines(self.files[index::num_shards], self.text_key)

    def skip(self, first: int) -> "CompressedLines":
        """Return the same lines without the first rows."""
        return CompressedLines(self.files, self.text_key, first)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = (row for file in self.files for row in self._rows(file))
        return islice(rows, self.first, None)

    def _rows(self, file: Path) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines(file), 1):
            if not line.strip():
                continue
            text: str | NullText
            try:
                text = text_of(line, self.text_key)
            except NullText as error:  # which the reader may skip
                text = NullText(f"{file}:{number}: {error}")
            except ConfigError as error:
                raise ConfigError(f"{file}:{number}: {error}") from None
            yield {self.text_key: text}


def lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a compressed file.

    Raises:
        ConfigError: if it cannot be decompressed.
    """
    import pyarrow

    try:
        check_magic(file)
        with _open(file) as stream:
            yield from stream
    except (OSError, EOFError, zlib.error, pyarrow.ArrowInvalid) as error:
        raise ConfigError(f"{file}: it is truncated or damaged: {error}") from None


def check_magic(file: Path) -> None:
    """Reject a file whose content does not match its suffix, before decompressing any of it."""
    with file.open("rb") as stream:
        start = stream.read(4)
    if not start.startswith(MAGIC[file.suffix.lower()]):
        raise ConfigError(f"{file}: it is not compressed as its name says ({file.suffix})")


def _open(file: Path) -> io.BufferedIOBase:
    if file.suffix.lower() == ".gz":
        return gzip.open(file)
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
