"""Checksums of documents that other software wrote, which are recorded with their index."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from torchtitan.config import ConfigError
from torchtitan.data.tokens.index import ShardTable
from torchtitan.data.tokens.processes import process_pool
from torchtitan.data.tokens.shard_files import damaged, first
from torchtitan.logging import logger

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


def of_one_dtype(root: Path, tables: Iterable[ShardTable]) -> Iterator[ShardTable]:
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
