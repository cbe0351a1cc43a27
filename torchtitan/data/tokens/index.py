"""Index of the documents in shards of tokens: the location, length and checksum of each.

A *shard* is a file of token ids. A document is a contiguous part of one, so all formats have the
same index, in a folder:

    index.json       the shards and what is known about them
    starts.u64       first byte of each document in its shard
    lengths.u32      tokens of each document
    checksums.u32    lower half of the xxh3 of each document's bytes, if they have been read

All numbers are little-endian. The arrays are memory-mapped, so opening an index takes the same time
for any number of documents. Documents are read, rather than mapped: if a file is truncated, or its
disk fails, reading raises an error, while a mapping ends the process; and the tokens that were
verified cannot change afterwards.
"""

import bisect
import contextlib
import functools
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from torchtitan.config import ConfigError
from torchtitan.data.file_cache import GIB, FileCache, Prefetcher, open_file

VERSION = 1
INDEX = "index.json"
ARRAYS = {"starts": "<u8", "lengths": "<u4", "checksums": "<u4"}
"""Arrays of an index, and their dtypes: `starts.u64` and so on."""
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
KEPT_DOCUMENTS = 8
"""Number of documents that were read last, which are not read again."""

Numbers = npt.NDArray[np.int64]


def array_file(folder: Path, name: str) -> Path:
    """Return the file of an array of the index in `folder`."""
    kind = np.dtype(ARRAYS[name])
    return folder / f"{name}.{kind.kind}{8 * kind.itemsize}"


@dataclass(frozen=True)
class ShardTable:
    """A shard and its documents, as a format finds them."""

    file: str
    """Path relative to the data set's folder."""
    bytes: int
    dtype: str
    """One of `DTYPES`, little-endian in the file."""
    starts: npt.NDArray[np.uint64]
    """First byte of each document."""
    lengths: npt.NDArray[np.uint32]
    """Tokens of each document."""
    checksums: npt.NDArray[np.uint32] | None = None


@dataclass(frozen=True)
class Shard:
    """Entry of a shard in `index.json`."""

    file: str
    bytes: int
    dtype: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class IndexDescription:
    """Contents of `index.json`."""

    version: int
    format: str
    """Key of `torchtitan.data.tokens.formats.TOKEN_FORMATS`."""
    documents: int
    tokens: int
    fingerprint: str
    """Digest of the shards' names, sizes and documents."""
    content: str | None
    """Digest of the checksums; None without them."""
    shards: tuple[Shard, ...]
    tokenizer: str | None = None
    """Fingerprint of the tokenizer, if known."""
    vocab_size: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    source: str | None = None
    """Description of the text that was tokenized."""


def write_index(
    folder: Path, format: str, shards: Iterable[ShardTable], **about: Any
) -> IndexDescription:
    """Write the index of `shards` into `folder`; `index.json` appears last.

    Args:
        about: further fields of `IndexDescription`.
    """
    unfinished = folder / "index.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    listed: list[Shard] = []
    structure, content = xxhash.xxh3_128(), xxhash.xxh3_128()
    has_checksums = True
    with contextlib.ExitStack() as stack:
        files = {
            name: stack.enter_context(array_file(unfinished, name).open("wb")) for name in ARRAYS
        }
        for table in shards:
            lengths = table.lengths.astype(ARRAYS["lengths"])
            tokens = int(lengths.sum(dtype=np.int64))
            shard = Shard(table.file, table.bytes, table.dtype, len(lengths), tokens)
            listed.append(shard)
            structure.update(json.dumps(asdict(shard)).encode())
            structure.update(lengths.tobytes())
            files["starts"].write(table.starts.astype(ARRAYS["starts"]).tobytes())
            files["lengths"].write(lengths.tobytes())
            if table.checksums is None:
                has_checksums = False
            else:
                checksums = table.checksums.astype(ARRAYS["checksums"]).tobytes()
                content.update(checksums)
                files["checksums"].write(checksums)
    if not has_checksums:
        array_file(unfinished, "checksums").unlink()
    description = IndexDescription(
        version=VERSION,
        format=format,
        documents=sum(shard.documents for shard in listed),
        tokens=sum(shard.tokens for shard in listed),
        fingerprint=structure.hexdigest()[:16],
        content=content.hexdigest()[:16] if has_checksums else None,
        shards=tuple(listed),
        **about,
    )
    (unfinished / INDEX).write_text(
        json.dumps(asdict(description), indent=1) + "\n", encoding="utf-8"
    )
    (folder / INDEX).unlink(missing_ok=True)
    for name in ARRAYS:
        array_file(folder, name).unlink(missing_ok=True)
    for file in sorted(unfinished.iterdir(), key=lambda file: file.name == INDEX):
        file.rename(folder / file.name)
    unfinished.rmdir()
    return description


def read_description(folder: Path) -> IndexDescription:
    """Read the `index.json` in `folder`.

    Raises:
        ConfigError: if it is damaged or of another version.
    """
    file = folder / INDEX
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["version"] != VERSION:
            raise ConfigError(
                f"{file}: version {values['version']}; wanted {VERSION}, so index the data again"
            )
        shards = tuple(Shard(**shard) for shard in values.pop("shards"))
        return IndexDescription(**values, shards=shards)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file}: not an index of tokens: {error}") from None


def read_tables(folder: Path) -> Iterator[ShardTable]:
    """Read the tables of the shards from the index in `folder`.

    Raises:
        ConfigError: if it is damaged.
    """
    about = read_description(folder)
    names = [name for name in ARRAYS if name != "checksums" or about.content is not None]
    arrays = {name: _array(folder, name, about.documents) for name in names}
    end = 0
    for shard in about.shards:
        begin, end = end, end + shard.documents
        parts = {name: array[begin:end] for name, array in arrays.items()}
        yield ShardTable(shard.file, shard.bytes, shard.dtype, **parts)


def checksum(tokens: npt.NDArray[Any]) -> int:
    """Return the checksum of a document's bytes in its shard."""
    return xxhash.xxh3_64_intdigest(tokens.data) & 0xFFFFFFFF


def group_shards(shards: Sequence[Shard], most: float) -> list[tuple[int, int]]:
    """Divide consecutive shards into windows of at most `most` bytes, or of a single shard.

    Returns:
        for each window, the number of documents up to its end, and its bytes.
    """
    found: list[tuple[int, int]] = []
    documents = size = 0
    for shard in shards:
        if size and size + shard.bytes > most:
            found.append((documents, size))
            size = 0
        documents, size = documents + shard.documents, size + shard.bytes
    return [*found, (documents, size)]


class TokenDocuments:
    """Tokenized documents by number, read from shards and verified."""

    def __init__(
        self,
        root: Path,
        index: Path,
        vocab_size: int,
        *,
        shuffle_window: float | None = None,
        cache: FileCache | None = None,
    ) -> None:
        """
        Args:
            root: folder of the shards.
            index: folder of their index.
            vocab_size: limit of the token ids.
            shuffle_window: GiB of a window; None: all documents are in one.
            cache: cache of remote shards.

        Raises:
            ConfigError: if the index is damaged, or the cache cannot hold two windows.
        """
        self.description = about = read_description(index)
        self.root, self.vocab_size = root, vocab_size
        self.shuffle_window = shuffle_window
        windows = group_shards(about.shards, (shuffle_window or sys.maxsize) * GIB)
        self.windows = sorted({0, *(end for end, _ in windows)})
        self.fingerprint = about.fingerprint
        self._starts = _array(index, "starts", about.documents)
        self._lengths = _array(index, "lengths", about.documents)
        self._checksums = (
            _array(index, "checksums", about.documents) if about.content is not None else None
        )
        self._ends = np.cumsum([shard.documents for shard in about.shards])
        dtypes = [np.dtype(shard.dtype).newbyteorder("<") for shard in about.shards]
        self._dtypes = [(dtype, _limit(dtype, vocab_size)) for dtype in dtypes]
        # The next samples may be parts of the same long document, which is verified as a whole.
        self._tokens = functools.lru_cache(maxsize=KEPT_DOCUMENTS)(self._read)
        self._cache, self._owner = cache, object()
        self._recent: deque[int] = deque(maxlen=2)
        self._prefetcher = Prefetcher(cache) if cache is not None else None
        self._prefetched: list[int] = []
        largest = sorted(size for _, size in windows)[-2:]
        self.cache_bytes = sum(largest) if cache is not None else 0
        """Size of two windows in the cache, the one that is read and the next."""
        if cache is not None:
            check_limit(cache.limit, self.cache_bytes, f"two windows of the shards in {root}")

    def __len__(self) -> int:
        return self.description.documents

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return self.description.tokens

    def lengths(self, documents: Numbers) -> Numbers:
        """Return the numbers of tokens of `documents`."""
        return self._lengths[documents].astype(np.int64)

    def read(self, document: int) -> npt.NDArray[Any]:
        """Return the tokens of a document, in the dtype of its shard.

        Raises:
            ConfigError: if they are not those that were written, or not all in the vocabulary.
        """
        return self.read_all(np.array([document]))[0]

    def read_all(self, documents: Numbers) -> list[npt.NDArray[Any]]:
        """Return the tokens of each of `documents`, as `read` does."""
        numbers = self._ends.searchsorted(documents, side="right").tolist()
        starts, counts = self._starts[documents].tolist(), self._lengths[documents].tolist()
        return list(map(self._tokens, documents.tolist(), numbers, starts, counts))

    def _read(self, document: int, number: int, start: int, count: int) -> npt.NDArray[Any]:
        """Read and verify a document in shard `number`."""
        shard, (dtype, limit) = self.description.shards[number], self._dtypes[number]
        if not count:
            return np.zeros(0, dtype)
        if start + count * dtype.itemsize > shard.bytes:
            raise ConfigError(f"{self.place(document)}: it ends after the file; index it again")
        if self._cache is not None:
            self._keep_recent(document)
        file = open_file(self._owner, self.root, shard.file, shard.bytes, self._cache)
        tokens = np.frombuffer(file.read(start, count * dtype.itemsize), dtype)
        if self._checksums is not None and checksum(tokens) != self._checksums[document]:
            raise ConfigError(
                f"{self.place(document)}: damaged, its checksum differs; restore the file, or run "
                "`torchtitan data index` if it is a new one"
            )
        # As unsigned numbers, negative ones are the largest.
        if limit and np.maximum.reduce(tokens.view(f"<u{dtype.itemsize}")) >= limit:
            beyond = np.flatnonzero((tokens >= self.vocab_size) | (tokens < 0))[0]
            raise ConfigError(
                f"{self.place(document, int(beyond))}: token {tokens[beyond]} is outside of the "
                f"vocabulary of {self.vocab_size}; it was made with another tokenizer; set "
                "model.tokenizer_path to that, or model.vocab_size to its size if there is none"
            )
        return tokens

    def place(self, document: int, token: int = 0) -> str:
        """Describe the location of a document, or of a token in it."""
        number = int(np.searchsorted(self._ends, document, side="right"))
        shard = self.description.shards[number]
        first = int(self._ends[number]) - shard.documents
        byte = int(self._starts[document]) + token * np.dtype(shard.dtype).itemsize
        return f"{self.root / shard.file}: document {document - first}, byte {byte:,}"

    def prefetch(self, documents: Numbers) -> None:
        """Fetch the shards of the first two windows of `documents` in the background."""
        if self._prefetcher is None:
            return
        windows = np.searchsorted(self.windows, documents, side="right") - 1
        first = list(dict.fromkeys(windows.tolist()))[:2]
        if first != self._prefetched:
            self._prefetched = first
            bounds = [(self.windows[n], self.windows[n + 1]) for n in first]
            shards = [
                self.description.shards[slice(*self._ends.searchsorted([begin + 1, end + 1]))]
                for begin, end in bounds
            ]
            self._prefetcher.request([(s.file, s.bytes) for found in shards for s in found])

    def _keep_recent(self, document: int) -> None:
        """Close the copies of remote shards in a new window, so that old ones can be deleted."""
        window = bisect.bisect_right(self.windows, document)
        if window not in self._recent:
            self._recent.append(window)
            open_file.cache_clear()


def check_limit(limit: int, needed: int, name: str) -> None:
    """Refuse a limit of the cache that is less than is needed for `name`."""
    if needed > limit:
        raise ConfigError(
            f"data.cache_limit: {limit / GIB:g} GiB cannot hold {name}; raise it to at least "
            f"{needed / GIB:.3g}, or lower data.shuffle_window (a window has at least one shard)"
        )


def _limit(dtype: np.dtype[Any], vocab_size: int) -> int | None:
    """Return the smallest number that is no token, as unsigned; None if all of `dtype` are."""
    limit = min(vocab_size, int(np.iinfo(dtype).max) + 1)
    return limit if limit < 2 ** (8 * dtype.itemsize) else None


def _array(folder: Path, name: str, count: int) -> npt.NDArray[Any]:
    path, dtype = array_file(folder, name), np.dtype(ARRAYS[name])
    size = path.stat().st_size if path.is_file() else None
    if size != count * dtype.itemsize:
        found = "missing" if size is None else f"has {size:,} bytes of {count * dtype.itemsize:,}"
        raise ConfigError(f"{path}: {found}; restore it, or index the data again")
    return np.asarray(np.memmap(path, dtype, "r")) if count else np.zeros(0, dtype)


class ShardWriter:
    """Writer of a shard in the format of this package: the tokens of its documents, in order.

    It appears under its name only when complete; `write_index` takes the tables of all shards.
    As a context, it closes its file if that is not completed.
    """

    def __init__(self, file: Path, dtype: str) -> None:
        self._file, self._dtype = file, np.dtype(dtype).newbyteorder("<")
        self._unfinished = file.with_name(f"{file.name}.unfinished")
        self._stream = self._unfinished.open("wb")
        self._lengths: list[int] = []
        self._checksums: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def add(self, tokens: Iterable[int] | npt.NDArray[Any]) -> None:
        """Append a document."""
        stored = np.asarray(tokens).astype(self._dtype)
        self._stream.write(stored.data)
        self._lengths.append(len(stored))
        self._checksums.append(checksum(stored))

    def close(self) -> ShardTable:
        """Complete the shard."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._unfinished.rename(self._file)
        lengths = np.array(self._lengths, np.uint32)
        ends = np.cumsum(lengths, dtype=np.uint64) * np.uint64(self._dtype.itemsize)
        return ShardTable(
            self._file.name,
            self._file.stat().st_size,
            self._dtype.name,
            np.concatenate([np.zeros(1, np.uint64), ends])[:-1],
            lengths,
            np.array(self._checksums, np.uint32),
        )
