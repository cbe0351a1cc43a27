"""Checks of data files before a run starts, so that mistakes are found in seconds.

The first line or the footer of every file is read, and about a second's worth of text and of
compressed data; later mistakes are found when they are read.
"""

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torchtitan.config import ConfigError
from torchtitan.data.compressed import lines
from torchtitan.data.documents import not_text, open_documents, text_of
from torchtitan.data.settings import DataConfig

MAX_FILES: Final = 1000
MAX_BYTES: Final = 2**30
"""Maximum bytes of text that are decoded, over all files."""
MAX_UNPACKED: Final = 2**27
"""Maximum bytes of compressed files that are decompressed, over all files."""
BLOCK: Final = 2**24


def check_files(path: Path, files: Sequence[Path], kind: str, config: DataConfig) -> None:
    """Reject files, of one kind, that cannot be read; they were found at `path`.

    Raises:
        ConfigError: with file and line.
    """
    text_key = config.text_key
    if kind not in ("text", "jsonl", "compressed"):
        size = config.document_bytes
        open_documents(path, files[:MAX_FILES], kind, text_key=text_key, document_bytes=size)
        return
    unpacked = MAX_UNPACKED
    for file in files[:MAX_FILES]:
        if kind == "jsonl":
            with file.open("rb") as stream:
                _check_first(file, next(filter(bytes.strip, stream), b""), text_key)
        elif kind == "compressed":
            _check_first(file, next(filter(bytes.strip, lines(file)), b""), text_key)
            unpacked -= _check_unpacking(file, unpacked)
    if kind in ("text", "jsonl"):
        if not any(file.stat().st_size for file in files):
            raise ConfigError(f"{path} holds no documents: its {kind} files are empty")
        left = MAX_BYTES
        for file in files:
            left -= _check_encoding(file, left)
            if left <= 0:
                break


def _check_first(file: Path, line: bytes, text_key: str) -> None:
    try:
        if line:
            text_of(line, text_key)
    except ConfigError as error:
        raise ConfigError(f"{file}:1: {error}") from None


def _check_unpacking(file: Path, most: int) -> int:
    """Check a compressed file; return the number of bytes decompressed."""
    read = 0
    for line in lines(file) if most > 0 else ():
        read += len(line)
        if read >= most:
            break
    return read


def _check_encoding(file: Path, most: int) -> int:
    """Check the encoding of a file; return the number of bytes decoded."""
    decoder, read, newlines = codecs.getincrementaldecoder("utf-8")(), 0, 0
    with file.open("rb") as stream:
        while read < most and (block := stream.read(min(BLOCK, most - read))):
            read += len(block)
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                line = newlines + error.object.count(b"\n", 0, error.start) + 1
                raise ConfigError(f"{file}:{line}: {not_text(error)}") from None
            newlines += block.count(b"\n")
        try:
            decoder.decode(b"", final=read < most)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}:{newlines + 1}: {not_text(error)}") from None
    return read
