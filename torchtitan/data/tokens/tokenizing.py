"""Tokenization of a source of text into shards, in parallel and restartable.

The documents are divided into *parts*, which do not depend on the number of processes. A process
writes a part into shards of its own, reads them back, and saves the table of their documents last.
A part with a table is not tokenized again after a restart. `index.json` appears when all parts are
complete; until then nothing reads the folder as shards.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from torchtitan.config import ConfigError, counted
from torchtitan.data.documents import NullTexts
from torchtitan.data.file_cache import locked
from torchtitan.data.lanes import tokenized
from torchtitan.data.order import Document, DocumentRange, Position, SinglePass, Source
from torchtitan.data.processes import process_pool
from torchtitan.data.settings import DATASETS, DataConfig
from torchtitan.data.sources import open_source
from torchtitan.data.tokenizer import Tokenizer, leading_tokens, separators
from torchtitan.data.tokens.index import (
    ARRAYS,
    INDEX,
    IndexDescription,
    ShardTable,
    ShardWriter,
    checksum,
    read_description,
    write_index,
)
from torchtitan.logging import TITLE, logger, make_progress, on_terminal

SHARD_TOKENS = 2**27
"""Tokens after which a shard is complete: 256 MiB, or 512 MiB for a large vocabulary."""
SETTINGS = "source.json"
"""Record of the source and the settings of the shards in a folder."""
UNFINISHED = "tokenizing"
"""Folder of the tables of complete parts, until the index is written."""
SECONDS = 30.0
"""Seconds between reports of progress in a log."""
REPORTED = 2**16
"""Tokens after which a process reports its progress."""


def tokenize(
    config: DataConfig,
    tokenizer: Tokenizer,
    output: Path,
    *,
    processes: int = 1,
    max_tokens: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    show_progress: bool = False,
) -> IndexDescription:
    """Tokenize the documents of a section `[data]`, in their order, into shards in `output`.

    The shards are the same for any number of processes. A call that was interrupted is continued
    by the next, and a complete folder is left as it is. If several processes call this at a time,
    one works and the others wait.

    Args:
        max_tokens: limit of the tokens, at which the last whole document ends.
        shard_tokens: number of tokens after which a shard is complete.
        show_progress: show a progress bar, or log the progress if there is no terminal.

    Raises:
        ConfigError: if the documents cannot be read, or `output` has other contents.
    """
    leading_tokens(tokenizer, config.add_bos, config.add_eos)  # refuses a missing BOS
    named = DATASETS.get(config.dataset)
    if named and (named.content != "text" or named.drawn):
        raise ConfigError(
            f"data.dataset: got {config.dataset}: {named.about}; name a data set of text, or a path"
        )
    source = open_source(config.model_copy(update={"shuffle": False}), tokenizer, seed=0)
    work = _Tokenization(config, source, tokenizer, output, max_tokens, shard_tokens)
    if not work.is_complete():
        with locked(output / UNFINISHED / "parts"):
            if not work.is_complete():
                work.run(processes, show_progress)
    return read_description(output)


class _Part(NamedTuple):
    """A complete part."""

    number: int
    tokens: int
    note: str | None
    """Warning about earlier work on it."""
    nulls: int = 0
    """Number of documents without text in it, if this process has completed it."""


class _Tokenization:
    """Parts of a source, and the files that they are written to."""

    def __init__(
        self,
        config: DataConfig,
        source: Source,
        tokenizer: Tokenizer,
        output: Path,
        max_tokens: int | None,
        shard_tokens: int,
    ) -> None:
        self._config, self._source, self._tokenizer = config, source, tokenizer
        self._output, self._max_tokens, self._shard_tokens = output, max_tokens, shard_tokens
        self._dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        divided = getattr(source, "parts", None)
        self._parts: list[DocumentRange] = (
            divided() if divided else [DocumentRange(None, Position(1, 0))]
        )
        self._bos, self._eos = separators(tokenizer, config.add_bos, config.add_eos)
        identity = {k: v for k, v in source.identity.items() if k not in ("shuffle", "seed")}
        self._settings: dict[str, Any] = {
            "source": identity,
            "held_out": config.is_held_out,
            "tokenizer": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "add_bos": self._bos,
            "add_eos": self._eos,
            "max_tokens": max_tokens,
            "shard_tokens": shard_tokens,
        }
        path = config.dataset_path or config.dataset
        self._about = f"{path}: {', '.join(f'{key} {value}' for key, value in identity.items())}"

    def is_complete(self) -> bool:
        """Whether the shards are complete.

        Raises:
            ConfigError: if the folder has other contents.
        """
        output, file = self._output, self._output / SETTINGS
        if not file.exists():
            if output.is_dir() and any(found.name != UNFINISHED for found in output.iterdir()):
                self._refuse("it has other files")
            return False
        try:
            earlier = dict(json.loads(file.read_text(encoding="utf-8")))
            if content := self._settings["source"].get("content"):  # which has been recorded later
                earlier["source"].setdefault("content", content)
        except (ValueError, TypeError, KeyError, AttributeError):
            self._refuse(f"its {SETTINGS} is damaged")
        if different := [key for key, value in self._settings.items() if earlier.get(key) != value]:
            changes = [f"{k} was {earlier.get(k)}, is {self._settings[k]}" for k in different]
            self._refuse(f"it has tokens of other settings: {'; '.join(changes)}")
        return (output / INDEX).exists()

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"{self._output}: {why}; choose another folder, or delete this one")

    def run(self, processes: int, show_progress: bool) -> None:
        """Tokenize all parts that are not complete, and write the index."""
        unfinished = self._output / UNFINISHED / SETTINGS
        unfinished.write_text(json.dumps(self._settings, indent=1) + "\n", encoding="utf-8")
        unfinished.rename(self._output / SETTINGS)
        processes = min(processes, len(self._parts))
        if multiprocessing.current_process().daemon:
            processes = 1  # it may not start others
        documents: Any = self._source.identity.get("documents")
        self.progress = _Progress(documents, show_progress)
        done: dict[int, int] = {}
        following = tokens = nulls = 0
        parts = self._completed(processes)
        for part in parts:
            if part.note:
                logger.warning("%s", part.note)
            done[part.number] = part.tokens
            nulls += part.nulls
            while following in done:
                tokens += done[following]
                following += 1
            if self._max_tokens is not None and tokens >= self._max_tokens:
                break
        parts.close()
        self.progress.close()
        self._finish(following)
        if nulls:
            logger.warning("data: %s skipped, as the text is null", counted(nulls, "document"))

    def _completed(self, processes: int) -> Generator[_Part, None, None]:
        """Yield the parts as they are completed."""
        numbers = iter(range(len(self._parts)))
        if processes == 1:
            yield from map(self.part, numbers)
            return
        with process_pool(processes, _begin, self) as pool:
            working: set[Future[_Part]] = set()
            while True:
                new = itertools.islice(numbers, 2 * processes - len(working))
                working |= {pool.submit(_complete, number) for number in new}
                if not working:
                    return
                done, working = wait(working, 0.1, FIRST_COMPLETED)
                yield from (future.result() for future in done)
                self.progress.show()

    def part(self, number: int) -> _Part:
        """Complete a part, or verify that it is complete."""
        file, note = self._output / UNFINISHED / f"{number:06d}.npz", None
        if file.exists():
            tables = list(_load(file))
            if (damage := self._damage(tables)) is None:
                self.progress.add(sum(len(t.lengths) for t in tables), _tokens(tables), 0)
                return _Part(number, _tokens(tables), None)
            note = f"{damage}; its documents are tokenized again"
        found: NullTexts | None = getattr(self._source, "nulls", None)
        before = found.count if found else 0
        try:
            tables = self._write(number)
            if damage := self._damage(tables):
                raise ConfigError(f"{damage} right after it was written; check the disk")
            _save(file, tables)
        except OSError as error:
            raise ConfigError(
                f"{error.filename or self._output}: {error.strerror}; the same command continues "
                "when that is mended"
            ) from None
        return _Part(number, _tokens(tables), note, found.count - before if found else 0)

    def _write(self, number: int) -> list[ShardTable]:
        """Write the shards of a part."""
        tables: list[ShardTable] = []
        total = added = count = 0
        documents = tokenized(
            self._documents(self._parts[number]),
            self._tokenizer,
            add_bos=self._bos,
            add_eos=self._eos,
        )
        limit = self._max_tokens or sys.maxsize
        while total < limit and (document := next(documents, None)):
            name, end = f"{number:06d}-{len(tables):03d}.tokens", total + self._shard_tokens
            with ShardWriter(self._output / name, self._dtype) as writer:
                while document:
                    tokens = document[1]
                    writer.add(tokens)
                    total, count = total + len(tokens), count + 1
                    if total - added >= REPORTED:
                        self.progress.add(count, total - added, total - added)
                        added, count = total, 0
                    document = None if total >= min(end, limit) else next(documents, None)
                tables.append(writer.close())
        self.progress.add(count, total - added, total - added)
        return tables

    def _documents(self, part: DocumentRange) -> Iterator[Document]:
        begin, end = part
        if begin is None:
            return SinglePass(self._source).read({0: None}, 1)[0]
        documents = self._source.read({0: begin}, 1)[0]
        if begin.round == end.round:  # so that none is read in vain
            documents = itertools.islice(documents, end.document - begin.document)
        return itertools.takewhile(lambda document: document.position < end, documents)

    def _damage(self, tables: Sequence[ShardTable]) -> str | None:
        """Read shards back; return the first difference from their tables."""
        for table in tables:
            file = self._output / table.file
            if not file.is_file() or file.stat().st_size != table.bytes:
                return f"{file}: missing or truncated"
            assert table.checksums is not None
            content = np.asarray(np.memmap(file, np.dtype(table.dtype).newbyteorder("<"), "r"))
            end = 0
            for document, (length, expected) in enumerate(
                zip(table.lengths.tolist(), table.checksums.tolist(), strict=True)
            ):
                begin, end = end, end + length
                if checksum(content[begin:end]) != expected:
                    byte = begin * content.itemsize
                    return f"{file}: document {document}, byte {byte:,}: damaged"
        return None

    def _finish(self, parts: int) -> None:
        """Write the index of the first `parts` parts, up to the limit of tokens."""
        tables = list(self._limited(parts))
        if not tables:
            raise ConfigError(
                f"{self._config.dataset_path or self._config.dataset}: no document has text"
                + " within the limit of tokens; raise it" * (self._max_tokens is not None)
            )
        kept = {table.file for table in tables}
        for file in [*self._output.glob("*.tokens"), *self._output.glob("*.tokens.unfinished")]:
            if file.name not in kept:
                file.unlink()
        write_index(
            self._output,
            "torchtitan",
            tables,
            tokenizer=self._tokenizer.fingerprint,
            vocab_size=self._tokenizer.vocab_size,
            add_bos=self._bos,
            add_eos=self._eos,
            source=self._about,
        )
        shutil.rmtree(self._output / UNFINISHED)

    def _limited(self, parts: int) -> Iterator[ShardTable]:
        """Yield the tables of the first `parts` parts; cut the shard at the limit of tokens."""
        left = self._max_tokens
        for number in range(parts):
            for table in _load(self._output / UNFINISHED / f"{number:06d}.npz"):
                if left is None:
                    yield table
                    continue
                ends = np.cumsum(table.lengths, dtype=np.int64)
                fitting = int(np.searchsorted(ends, left, side="right"))
                if fitting == len(ends):
                    left -= int(ends[-1])
                    yield table
                    continue
                if fitting:
                    cut = _first(table, fitting)
                    os.truncate(self._output / cut.file, cut.bytes)
                    yield cut
                return


def _tokens(tables: Sequence[ShardTable]) -> int:
    return sum(int(table.lengths.sum(dtype=np.int64)) for table in tables)


def _first(table: ShardTable, documents: int) -> ShardTable:
    """Return the table of a shard with only its first documents."""
    assert table.checksums is not None
    lengths = table.lengths[:documents]
    size = int(lengths.sum(dtype=np.int64)) * np.dtype(table.dtype).itemsize
    starts, checksums = table.starts[:documents], table.checksums[:documents]
    return replace(table, bytes=size, starts=starts, lengths=lengths, checksums=checksums)


def recorded_content(folder: Path, content: Any) -> Any:
    """Return the digest of the text of tokens; `content` is recorded if they are of before it was.

    Raises:
        ValueError, TypeError, KeyError: if the record is damaged.
    """
    file = folder / SETTINGS
    settings = json.loads(file.read_text(encoding="utf-8"))
    if content is not None and "content" not in settings["source"]:
        settings["source"]["content"] = content
        with contextlib.suppress(OSError):
            file.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    return dict(settings["source"]).get("content")


def _save(file: Path, tables: Sequence[ShardTable]) -> None:
    """Write the tables of the shards of a part."""
    arrays: dict[str, Any] = {
        "about": np.array([(table.file, table.bytes, table.dtype) for table in tables], np.str_),
        "documents": [len(table.lengths) for table in tables],
    }
    for name in ARRAYS:
        arrays[name] = np.concatenate([getattr(table, name) for table in tables] or [[]])
    unfinished = file.with_suffix(".unfinished")
    with unfinished.open("wb") as stream:
        np.savez(stream, **arrays)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(file)


def _load(file: Path) -> Iterator[ShardTable]:
    """Read the tables of the shards of a part."""
    with np.load(file) as saved:
        ends = np.cumsum(saved["documents"])
        arrays = {name: np.split(saved[name], ends[:-1]) for name in ARRAYS}
        for n, (name, size, dtype) in enumerate(saved["about"].tolist()):
            yield ShardTable(
                name, int(size), dtype, **{key: array[n] for key, array in arrays.items()}
            )


class _Progress:
    """Progress of all processes, as a bar, or in the log."""

    def __init__(self, documents: int | None, is_visible: bool) -> None:
        self.is_visible = is_visible
        self._counts = multiprocessing.get_context("fork").Array("q", 3)  # shared with forks
        self._documents = documents
        self._start = self._shown = time.monotonic()
        self._bar: Any = None
        if is_visible and on_terminal():
            from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

            columns = TITLE, BarColumn(), MofNCompleteColumn(), "{task.fields[about]}"
            self._bar = make_progress(*columns, TimeRemainingColumn())
            self._task = self._bar.add_task("documents", total=documents, about="")
            self._bar.start()

    def add(self, documents: int, tokens: int, new: int) -> None:
        """Count documents and tokens that are complete, and those of them that were not before."""
        with self._counts:
            for place, count in enumerate((documents, tokens, new)):
                self._counts[place] += count
        self.show()

    def show(self, *, is_last: bool = False) -> None:
        """Show the progress, if it is time."""
        now = time.monotonic()
        if not self.is_visible or (
            not is_last and now - self._shown < (0.1 if self._bar else SECONDS)
        ):
            return
        self._shown = now
        counts: Any = self._counts.get_obj()  # a process may have died with the lock
        documents, tokens, new = counts
        about = f"{tokens:,} tokens, {new / max(now - self._start, 1e-9):,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, completed=documents, about=about, refresh=True)
        else:
            done = f"{documents:,} of " if self._documents else ""
            found = counted(self._documents or documents, "document")
            logger.info("tokenized %s%s: %s", done, found, about)

    def close(self) -> None:
        self.show(is_last=True)
        if self._bar:
            self._bar.stop()


TOKENIZATION: ContextVar[_Tokenization] = ContextVar("TOKENIZATION")
"""The tokenization of which a process of the pool completes parts."""


def _begin(work: _Tokenization) -> None:
    """Prepare a process of the pool."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    work.progress.is_visible = False
    TOKENIZATION.set(work)


def _complete(number: int) -> _Part:
    """Complete a part in a process of the pool."""
    return TOKENIZATION.get().part(number)
