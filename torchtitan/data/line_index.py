"""Index of the lines of a file, cached next to it or in `data.cache`.

The cache is memory-mapped, so memory does not grow with the number of lines.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan.config import ConfigError
from torchtitan.data.file_cache import cache_folder, content_of, locked
from torchtitan.logging import logger

CACHED_BYTES = 2**20
"""Size from which the index of a file is cached."""
BLOCK = 2**26
BLANK = re.compile(rb"\s*?(?:\n|\Z)")
"""Rest of a line of blanks, which is no document, as in compressed files."""

Starts = npt.NDArray[np.int64]


def line_starts(path: Path, cache: Path | None = None) -> Starts:
    """Return the start of each line that is not blank, in bytes.

    The index is built once, by the process that gets a lock. It is kept in memory if the file is
    small, or the cache cannot be written.

    Args:
        cache: folder of the cache. Default: .torchtitan next to the file.
    """
    status = path.stat()
    if status.st_size < CACHED_BYTES:
        return np.concatenate([*_blocks(path), np.zeros(0, np.int64)])
    time = status.st_mtime_ns ^ int(content_of(path)[:15], 16)
    stamp = np.array([status.st_size, time])
    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    file = cache_folder(path, cache) / f"lines-{path.name}-{key}.i64"
    try:
        if (found := _cached(file, stamp)) is not None:
            return found
        with locked(file.with_name("lines")):
            if (found := _cached(file, stamp)) is not None:
                return found
            unfinished = file.with_suffix(".unfinished")
            with unfinished.open("wb") as stream:
                for numbers in (stamp, *_blocks(path)):
                    stream.write(numbers.astype("<i8").data)
            unfinished.rename(file)
        return np.memmap(file, "<i8", "r")[len(stamp) :]
    except (OSError, ConfigError) as error:  # not a fault of the data, and only slower
        logger.info("data: the index of %s is not cached: %s", path, error)
        return np.concatenate(list(_blocks(path)))


def _cached(file: Path, stamp: Starts) -> Starts | None:
    """Return the cached index of a file with this stamp."""
    if not file.is_file() or file.stat().st_size < stamp.nbytes:
        return None
    numbers = np.memmap(file, "<i8", "r")
    return numbers[len(stamp) :] if (numbers[: len(stamp)] == stamp).all() else None


def _blocks(path: Path) -> Iterator[Starts]:
    """Yield the starts of the lines of a file, a block of it at a time."""
    content = np.memmap(path, np.uint8, "r")
    for begin in range(0, len(content), BLOCK):
        starts = begin + 1 + np.flatnonzero(content[begin : begin + BLOCK] == ord("\n"))
        if not begin:
            starts = np.concatenate([np.zeros(1, np.int64), starts])
        starts = starts[starts < len(content)]
        first = content[starts]
        blank = first == ord("\n")
        for number in np.flatnonzero(np.isin(first, np.frombuffer(b" \t\r\v\f", np.uint8))):
            blank[number] = BLANK.match(content.data, int(starts[number])) is not None
        yield starts[~blank]
