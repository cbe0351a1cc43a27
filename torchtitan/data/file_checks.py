"""Checks of data files before a run starts, so that mistakes are found in seconds.

The first line or the footer of every file is read, and about a second's worth of text and of
compressed data; later mistakes are found when they are read.
"""

import codecs
import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from torchtitan import __version__
from torchtitan.config import ConfigError
from torchtitan.data.documents import NullText, not_text, open_documents, text_of, wrong_text
from torchtitan.data.file_cache import contents_of, locked, reading
from torchtitan.data.settings import DataConfig
from torchtitan.data.streaming import lines
from torchtitan.logging import logger

MAX_FILES: Final = 1000
MAX_BYTES: Final = 2**30
"""Maximum bytes of text that are decoded, over all files."""
MAX_UNPACKED: Final = 2**27
"""Maximum bytes of compressed files that are decompressed, over all files."""
BLOCK: Final = 2**24
HEAD: Final = 8000
"""Bytes at the start of a text file among which none is 0."""
SHARED_BYTES: Final = 2**20
"""Bytes of all files from which a check is not repeated by other processes of the node."""


def check_files(path: Path, files: Sequence[Path], kind: str, config: DataConfig) -> None:
    """Reject files, of one kind, that cannot be read; they were found at `path`.

    Of all ranks of a node and their launcher, the first one checks while the others wait. It is
    recorded in the folder for temporary files, and repeated when a file has changed.

    Raises:
        ConfigError: with file and line.
    """
    found = [(str(file), file.stat()) for file in files]
    if sum(status.st_size for _, status in found) < SHARED_BYTES:
        _check(path, files, kind, config)
        return
    stamps = _digest(
        [contents_of(files)]
        + [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in found]
    )
    settings = [__version__, str(path.resolve()), kind, config.text_key, config.document_bytes]
    settings.append(config.null_text)
    folder = Path(tempfile.gettempdir()) / f"torchtitan-{os.getuid()}"
    record, known = folder / f"checked-{_digest(settings)}", None
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid == os.getuid():
                held.enter_context(locked(record))
                known = record.read_text(encoding="utf-8") if record.is_file() else None
        except (OSError, ConfigError) as error:
            logger.debug("the check of %s is not shared: %s", path, error)
        if known != stamps:
            _check(path, files, kind, config)
            with contextlib.suppress(OSError):
                record.write_text(stamps, encoding="utf-8")


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _check(path: Path, files: Sequence[Path], kind: str, config: DataConfig) -> None:
    text_key = config.text_key
    if kind not in ("text", "jsonl", "compressed"):
        size = config.document_bytes
        chosen = files[:MAX_FILES]
        documents = open_documents(path, chosen, kind, text_key=text_key, document_bytes=size)
        if (nulls := getattr(documents, "nulls", 0)) and config.null_text == "error":
            row = {text_key: None}
            raise wrong_text(row, text_key, f"{path}: {nulls:,} of {len(documents):,} documents: ")
        if nulls == len(documents):
            raise ConfigError(f"{path} holds no text: every {text_key!r} is null")
        return
    unpacked, is_empty = MAX_UNPACKED, len(files) <= MAX_FILES
    for file in files[:MAX_FILES]:
        if kind == "jsonl":
            with reading(file), file.open("rb") as stream:
                is_empty &= not _check_lines(file, stream, 1, config)
        elif kind == "compressed":
            unpacked -= (read := _check_lines(file, lines(file), unpacked, config))
            is_empty &= not read
        elif file.stat().st_size:
            is_empty = False
    if is_empty:
        raise ConfigError(f"{path} holds no text: its {kind} files are empty, or every document is")
    if kind in ("text", "jsonl"):
        left = MAX_BYTES
        for file in files:
            with reading(file):
                left -= _check_encoding(file, left, kind, config)
            if left <= 0:
                break


def _check_line(file: Path, number: int, line: bytes, config: DataConfig) -> bool:
    """Check a line, and return whether it has text."""
    try:
        return bool(text_of(line, config.text_key))
    except ConfigError as error:
        if not isinstance(error, NullText) or config.null_text == "error":
            raise ConfigError(f"{file}:{number}: {error}") from None
        return False


def _check_lines(file: Path, found: Iterable[bytes], most: int, config: DataConfig) -> int:
    """Check the lines up to the first one with text, and nulls in `most` bytes.

    Returns:
        the bytes that were read; 0 if no line has text.
    """
    read, has_text = 0, False
    for number, line in enumerate(found, 1):
        read += len(line)
        if (not has_text or b"null" in line) and line.strip():
            has_text |= _check_line(file, number, line, config)
        if read >= most and (has_text or read >= MAX_UNPACKED):
            return read
    return read if has_text else 0


def _check_encoding(file: Path, most: int, kind: str, config: DataConfig) -> int:
    """Check the encoding of a file, and JSON for null; return the number of bytes decoded."""
    key = json.dumps(config.text_key).encode()
    null, size = re.compile(re.escape(key) + rb"\s*:\s*null"), file.stat().st_size
    decoder, read, newlines = codecs.getincrementaldecoder("utf-8")(), 0, 0
    with file.open("rb") as stream:
        while read < most and (block := stream.read(min(BLOCK, most - read))):
            if kind == "text" and not read and (zero := block.find(b"\0", 0, HEAD)) >= 0:
                line = block.count(b"\n", 0, zero) + 1
                why = f"(byte {zero} is 0); is it UTF-16, or no text at all?"
                raise ConfigError(f"{file}:{line}: not UTF-8 text {why}")
            read += len(block)
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                line = newlines + error.object.count(b"\n", 0, error.start) + 1
                raise ConfigError(f"{file}:{line}: {not_text(error)}") from None
            for found in null.finditer(block) if kind == "jsonl" else ():
                begin = block.rfind(b"\n", 0, found.start()) + 1
                end = block.find(b"\n", found.end())
                if begin and (end > 0 or read == size):  # the whole line is in this block
                    number = newlines + block.count(b"\n", 0, begin) + 1
                    _check_line(file, number, block[begin : end if end > 0 else size], config)
            newlines += block.count(b"\n")
        try:
            decoder.decode(b"", final=read < most)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}:{newlines + 1}: {not_text(error)}") from None
    return read
