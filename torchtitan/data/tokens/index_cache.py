"""Opening of tokenized documents, with an index that one process builds for all."""

import contextlib
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from torchtitan.config import ConfigError, allowed_names
from torchtitan.data.file_cache import (
    CACHE_LIMIT,
    GIB,
    FileCache,
    Stamp,
    cache_folder,
    fetch,
    locked,
    reading,
    stamps_of,
    writing,
)
from torchtitan.data.processes import process_pool
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.tokens.formats import (
    TOKEN_FORMATS,
    OwnFormat,
    TokenFormat,
    damaged,
    first,
    root_of,
)
from torchtitan.data.tokens.index import (
    ARRAYS,
    INDEX,
    ShardTable,
    TokenDocuments,
    array_file,
    read_description,
    write_index,
)
from torchtitan.logging import logger
from torchtitan.remote import RemotePath

LIMIT = 2**30
"""Bytes of shards whose checksums are recorded when a run builds their index."""
PART = 2**27
"""Bytes of documents that a process reads at a time."""

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ShardPart:
    """Consecutive documents of a shard."""

    file: Path
    starts: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.int64]
    """Bytes of each document."""


def in_order(
    processes: int, function: Callable[[Job], Result], jobs: Iterable[Job]
) -> Iterator[Result]:
    """Yield the result of `function` for each job, computed by some processes ahead of time."""
    if processes == 1:
        yield from map(function, jobs)
        return
    with process_pool(processes) as pool:
        waiting: deque[Future[Result]] = deque()
        for job in jobs:
            waiting.append(pool.submit(function, job))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def record_all(
    root: Path,
    tables: Iterable[ShardTable],
    processes: int,
    advance: Callable[[int], object] = lambda size: None,
) -> Iterator[ShardTable]:
    """Add the checksums of all documents to the tables of shards.

    Args:
        advance: called with the bytes that have been read since the last call.
    """
    pending: deque[tuple[ShardTable, int]] = deque()

    def parts() -> Iterator[ShardPart]:
        for table in tables:
            found = list(_parts(root, table))
            pending.append((table, len(found)))
            yield from found

    sums: list[npt.NDArray[np.uint32]] = []
    for size, checksums in in_order(processes, _read, parts()):
        sums.append(checksums)
        advance(size)
        if len(sums) == pending[0][1]:
            yield replace(pending.popleft()[0], checksums=np.concatenate(sums))
            sums = []


def record_small(root: Path, tables: Iterable[ShardTable]) -> Iterator[ShardTable]:
    """Add checksums to the tables of shards, unless they have more than `LIMIT` bytes."""
    total = 0
    for table in tables:
        total += table.bytes
        yield from record_all(root, [table], 1) if total <= LIMIT else [table]
    if total > LIMIT:
        logger.warning(
            "data: %s: its %.1f GiB have no checksums, so a changed byte in the tokens would go "
            "unnoticed; `torchtitan data index` records them",
            root,
            total / 2**30,
        )


def require_one_dtype(root: Path, tables: Iterable[ShardTable]) -> Iterator[ShardTable]:
    """Yield the tables of shards.

    Raises:
        ConfigError: if not all shards have the same dtype.
    """
    known: ShardTable | None = None
    for table in tables:
        known = known or table
        if table.dtype != known.dtype:
            raise ConfigError(
                f"{root / table.file}: its tokens are {table.dtype}, and those of {known.file} "
                f"{known.dtype}; move one of them to another folder, as a source of its own"
            )
        yield table


def _parts(root: Path, table: ShardTable) -> Iterator[ShardPart]:
    sizes = table.lengths.astype(np.int64) * np.dtype(table.dtype).itemsize
    long = first((table.starts > table.bytes) | (table.starts + sizes.astype("u8") > table.bytes))
    if long is not None:
        message = f"document {long} is after the end of the file, of {table.bytes:,} bytes"
        raise damaged(root / table.file, int(table.starts[long]), message)
    numbers = np.cumsum(sizes) // PART
    for number in range(int(numbers[-1]) + 1 if len(numbers) else 1):
        chosen = slice(*np.searchsorted(numbers, [number, number + 1]).tolist())
        # A remote shard is fetched here, as its path cannot be sent to a process.
        yield ShardPart(Path(os.fspath(root / table.file)), table.starts[chosen], sizes[chosen])


def _read(part: ShardPart) -> tuple[int, npt.NDArray[np.uint32]]:
    """Return the bytes and checksums of documents."""
    sums = np.empty(len(part.starts), np.uint32)
    with open(part.file, "rb", 2**20) as file:
        for n, (start, size) in enumerate(
            zip(part.starts.tolist(), part.sizes.tolist(), strict=True)
        ):
            file.seek(start)
            content = file.read(size)
            if len(content) != size:
                raise damaged(part.file, start + len(content), "truncated while it was read")
            sums[n] = xxhash.xxh3_64_intdigest(content) & 0xFFFFFFFF
    return int(part.sizes.sum()), sums


def wrong_digests(files: Iterable[tuple[Path, Any]]) -> Iterator[str]:
    """Yield a message for each file that has another digest than its format has recorded."""
    for file, digests in files:
        for algorithm, wanted in digests.items():
            if algorithm in hashlib.algorithms_available:
                known = hashlib.new(algorithm)
            elif algorithm in xxhash.algorithms_available:
                known = getattr(xxhash, algorithm)()
            else:
                continue
            with open(file, "rb") as stream:
                while block := stream.read(2**22):
                    known.update(block)
            if known.hexdigest() != wanted:
                yield f"{file}: damaged: its {algorithm} is not what its index says"


REMOTE_WINDOW = 8.0
"""Default of `data.shuffle_window` for URLs, in GiB."""

Recorder = Callable[[Path, Iterable[ShardTable]], Iterator[ShardTable]]
"""Function that adds checksums to the tables of shards in a folder."""


@reading()
def find_format(path: Path, format: TokenFormat) -> TokenFormat | None:
    """Return the format of the files at `path`, which `format` may leave open; None if unknown."""
    if format.name != "auto":
        return format
    formats = (cls() for name, cls in TOKEN_FORMATS.items() if name != "auto")
    return next((each for each in formats if each.files(path)), None)


def index_folder(path: Path, format: TokenFormat, tokenizer: Tokenizer, cache: Path | None) -> Path:
    """Return the folder of the index of the shards at `path`."""
    if isinstance(format, OwnFormat) and not isinstance(path, RemotePath):
        return path
    settings = format.resolved(tokenizer).model_dump()
    key = hashlib.sha256(json.dumps([str(path.resolve()), settings]).encode())
    return cache_folder(path, cache) / f"index-{format.name}-{key.hexdigest()[:12]}"


@reading()
def open_tokens(
    path: Path,
    format: TokenFormat,
    tokenizer: Tokenizer,
    vocab_size: int,
    cache: Path | None,
    *,
    shuffle_window: float | None = None,
    cache_limit: float = CACHE_LIMIT,
    record: Recorder | None = None,
) -> TokenDocuments:
    """Open the shards at `path`, building their index if there is none yet.

    Args:
        cache: folder of `data.cache`.
        shuffle_window: the setting `data.shuffle_window`.
        cache_limit: the setting `data.cache_limit`.
        record: adds the checksums that an index must have; None: those of small shards are added.

    Raises:
        ConfigError: if the files are not shards of tokens, or damaged.
    """
    if type(format).tables is TokenFormat.tables:
        raise ConfigError(f"format {format.name}: {type(format).__name__} has no tables; add it")
    files = format.files(path)
    if not files:
        suffix = getattr(format, "suffix", None)
        others = (
            f"wanted files that end with {suffix} (data.format.suffix)"
            if suffix
            else (allowed_names("", TOKEN_FORMATS))
        )
        raise ConfigError(f"{path}: no tokens in the format {format.name}; {others}")
    root, folder = root_of(path), cache_folder(path, cache)
    stamps, copies = stamps_of(files, root), None
    if isinstance(root, RemotePath):
        shuffle_window = shuffle_window or REMOTE_WINDOW
        version = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
        copies = FileCache(root, version, folder, int(cache_limit * GIB))
    index = index_folder(path, format, tokenizer, cache)
    if index != path:
        with locked(index):
            if not _is_current(index, root, stamps, is_asked=record is not None):
                logger.info("data: indexing %s (%s, %d files)", path, format.name, len(files))
                if copies is not None and isinstance(format, OwnFormat):
                    _fetch_index(copies.root, index)
                else:
                    local = copies.path(path) if copies else path
                    tables = require_one_dtype(root, format.tables(local, tokenizer))
                    if record or copies is None:
                        tables = (record or record_small)(root_of(local), tables)
                    with writing(index):
                        write_index(index, format.name, _all_of(tables))
                (index / "files.json").write_text(json.dumps(stamps), encoding="utf-8")
    return TokenDocuments(root, index, vocab_size, shuffle_window=shuffle_window, cache=copies)


def _all_of(tables: Iterable[ShardTable]) -> Iterator[ShardTable]:
    """Yield tables; what cannot be read is not what cannot be written."""
    with reading():
        yield from tables


def _fetch_index(root: RemotePath, index: Path) -> None:
    """Fetch the index next to remote shards."""
    shutil.rmtree(index, ignore_errors=True)
    sizes = root.sizes()
    for name in (*(array_file(index, name).name for name in ARRAYS), INDEX):
        if name in sizes:
            fetch(root / name, sizes[name], index / name)


def _is_current(index: Path, root: Path, stamps: Sequence[Stamp], *, is_asked: bool) -> bool:
    """Whether an index was built from files with these stamps.

    Args:
        is_asked: whether it must also have checksums of just these bytes. Otherwise a shard of the
            same size and time is left to its checksums, which tell damage from a new file.
    """
    file = index / "files.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        about = read_description(index)
    except (OSError, ValueError):
        return False
    if found == [stamp[:3] for stamp in stamps] != stamps:  # of before stamps had digests
        with contextlib.suppress(OSError):
            file.write_text(json.dumps(stamps), encoding="utf-8")
        found = stamps
    has_checksums = about.content is not None
    shards = {str(root / shard.file) for shard in about.shards if has_checksums and not is_asked}
    pairs = zip(found, stamps, strict=False)
    return (
        len(found) == len(stamps)
        and all(old == new or (old[:3] == new[:3] and new[0] in shards) for old, new in pairs)
        and (has_checksums or not is_asked)
    )
