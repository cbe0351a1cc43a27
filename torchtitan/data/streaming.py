"""Documents that are streamed: data sets of the Hugging Face hub, and compressed JSON Lines.

A streamed set can only be read from the start of a shard (a file), so shards are shuffled and
assigned: lane l of L reads the shards s = l, l + L, ... of an endless sequence that covers all of
them once an epoch. A set with fewer shards than lanes is distributed by document instead: every
reader goes through the whole stream and keeps the documents of its lanes. A set of the hub can also
be downloaded first, and is then read in any order.
"""

import gzip
import io
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigError, Unreachable
from torchtitan.data.documents import NullText, NullTexts, clean, text_of, wrong_text
from torchtitan.data.order import Document, DocumentRange, Position, Shuffled
from torchtitan.data.settings import Dataset


class StreamedDocuments(Shuffled):
    """Documents of a streamed set. A position counts shards, and documents inside the shard.

    The shards are reshuffled each epoch, the documents inside a shard are not.
    """

    def __init__(
        self,
        name: str,
        fingerprint: str,
        dataset: Any,
        text_key: str,
        *,
        seed: int,
        shuffle: bool,
        null_text: str = "error",
    ) -> None:
        columns = dataset.column_names
        if columns is not None:
            _check_column(name, text_key, columns)
            dataset = dataset.select_columns([text_key])
        self._name = name
        self._dataset = dataset
        self._text_key = text_key
        self._shards: int = dataset.num_shards
        about = {"dataset": fingerprint, "shards": self._shards, "text_key": text_key}
        super().__init__([0, self._shards], about, seed=seed, shuffle=shuffle)
        self.nulls = NullTexts(null_text)

    def epoch(self, position: Position) -> int:
        return position.round // self._shards

    def parts(self) -> list[DocumentRange]:
        """Divide an epoch into parts that can be read by themselves: its shards."""
        return [DocumentRange(Position(n, 0), Position(n + 1, 0)) for n in range(self._shards)]

    def advice(self, lanes: int) -> str | None:
        if self._shards >= lanes:
            return None
        return (
            f"{self._name} has {self._shards} shards for {lanes} lanes: every worker of every rank "
            "reads the whole stream and keeps its share; fewer data.lanes, a single "
            "data.num_workers or data.streaming = false make that cheaper"
        )

    def read(
        self, starts: Mapping[int, Position | None], lanes: int
    ) -> dict[int, Iterator[Document]]:
        if self._shards < lanes:
            return self._distribute(starts, lanes)
        return {
            lane: self._read_shards(start or Position(lane, 0), step=lanes)
            for lane, start in starts.items()
        }

    def _read_shards(self, start: Position, step: int) -> Iterator[Document]:
        """Yield the documents of every `step`-th shard, starting at `start`."""
        count = start.round
        first = start.document
        empty = 0
        while True:
            epoch, place = divmod(count, self._shards)
            shard = int(self._order(epoch)[place])
            for number, row in enumerate(self._rows(shard, first), first):
                text = row.get(self._text_key)
                if not isinstance(text, str):
                    where = f"{self._name}: shard {shard + 1}, document {number + 1}: "
                    is_known = isinstance(text, NullText)  # with its line
                    error = text if is_known else wrong_text(row, self._text_key, where)
                    text = self.nulls.skip(error)
                yield Document(Position(count, number), clean(text))
                empty = -1
            empty += 1
            if empty > self._shards:
                raise ConfigError(f"{self._name} has no documents: its shards are empty")
            count += step
            first = 0

    def _rows(self, shard: int, first: int) -> Iterator[Any]:
        """Yield the rows of a shard from `first` on; errors of `datasets` become `Unreachable`."""
        rows = self._dataset.shard(num_shards=self._shards, index=shard).skip(first)
        try:
            yield from rows
        except (ConfigError, Unreachable):
            raise
        except Exception as error:  # of many HTTP clients and stores, without a common base
            why = f"{type(error).__name__}: {error}"
            raise Unreachable(f"{self._name}: shard {shard + 1} cannot be read: {why}") from error

    def _distribute(
        self, starts: Mapping[int, Position | None], lanes: int
    ) -> dict[int, Iterator[Document]]:
        """Assign document n of shard s to lane (s + n) mod L; lanes not in `starts` are skipped."""
        begin = {lane: start or Position(0, 0) for lane, start in starts.items()}
        waiting: dict[int, deque[Document]] = {lane: deque() for lane in starts}
        everything = self._read_shards(min(begin.values()), step=1)

        def lane_documents(lane: int) -> Iterator[Document]:
            while True:
                while not waiting[lane]:
                    document = next(everything)
                    owner = sum(document.position) % lanes
                    if owner in begin and document.position >= begin[owner]:
                        waiting[owner].append(document)
                yield waiting[lane].popleft()

        return {lane: lane_documents(lane) for lane in starts}


class DownloadedDocuments:
    """Documents of a downloaded set, readable in any order."""

    def __init__(self, name: str, dataset: Any, text_key: str) -> None:
        _check_column(name, text_key, dataset.column_names)
        self._name = name
        self._dataset = dataset.select_columns([text_key])
        self._text_key = text_key
        self.windows = [0, len(dataset)]
        self.counts = [(name, len(dataset))]
        self.fingerprint = f"{name}/{text_key}"

    def __len__(self) -> int:
        return self.windows[-1]

    def __getitem__(self, index: int) -> str:
        row = self._dataset[index]
        if not isinstance(row[self._text_key], str):
            raise wrong_text(row, self._text_key, f"{self._name}: document {index + 1}: ")
        return clean(row[self._text_key])


def _check_column(name: str, text_key: str, columns: list[str]) -> None:
    if text_key not in columns:
        raise ConfigError(
            f"{name}: no column {text_key!r} (data.text_key); it has {', '.join(columns)}"
        )


def load_hub(description: Dataset, *, streaming: bool) -> Any:
    """Load a named set of the hub, as a data set of the `datasets` library."""
    import datasets

    where = f"the data set {description.path} on the Hugging Face hub"
    try:
        return datasets.load_dataset(
            description.path, description.name, split=description.split, streaming=streaming
        )
    except OSError as error:  # no network, or no such repository
        raise Unreachable(
            f"cannot reach {where}: {error}. Without a network, set data.dataset_path to a copy, "
            'or use data.dataset = "python_stdlib"'
        ) from error


MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
"""First bytes of a file, by its suffix."""


@dataclass(frozen=True)
class CompressedLines:
    """Compressed files in the interface that `StreamedDocuments` reads; each is a shard.

    gzip is decompressed by Python, zstd by Arrow. Truncated and invalid files are reported by name
    when read.
    """

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
