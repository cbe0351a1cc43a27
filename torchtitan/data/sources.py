"""Opening the documents named by a recipe, as a source that lanes can read."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from torchtitan.config import ConfigError, Context, RecipeError, Registry, flat, hub, local_path
from torchtitan.config.words import told
from torchtitan.data.discovery import find_files, fingerprint_files
from torchtitan.data.documents import (
    FORMATS,
    Documents,
    NullText,
    NullTexts,
    open_documents,
    python_stdlib,
    require_parts,
)
from torchtitan.data.file_cache import (
    GIB,
    Stamp,
    cache_folder,
    contents_of,
    fetch_all,
    reading,
    stamps_of,
)
from torchtitan.data.file_checks import check_files
from torchtitan.data.order import Document, DocumentRange, Identity, Position, Shuffled, Source
from torchtitan.data.settings import DATASETS, NO_PART, DataConfig, Dataset
from torchtitan.data.streaming import (
    CompressedLines,
    DownloadedDocuments,
    StreamedDocuments,
    load_hub,
)
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.remote import RemotePath, path_to_read


class CountedDocuments(Documents, Protocol):
    """Documents of several files, one file after the other."""

    counts: Sequence[tuple[str, int]]
    """Name of each file, relative to the data set's folder, and its number of documents."""


class DocumentsPart:
    """The documents that are held out, or all others."""

    def __init__(self, documents: CountedDocuments, fraction: float, held_out: bool) -> None:
        """
        Args:
            fraction: fraction of the documents that is held out.
            held_out: whether this is the part that is held out.

        Raises:
            ConfigError: if one of the parts is empty.
        """
        self._documents, self.total = documents, len(documents)
        chosen = are_held_out(documents.counts, fraction)
        if (count := int(chosen.sum())) in (0, self.total):
            raise ConfigError(
                f"data.validation_fraction: {fraction:g} holds out {'all' if count else 'none'} of "
                f"{self.total:,} document{'s' * (self.total > 1)}; use another fraction or more "
                "documents (a smaller data.document_bytes splits text files further)"
            )
        self._numbers = np.flatnonzero(chosen == held_out)
        bounds = np.searchsorted(self._numbers, documents.windows)
        self.windows: list[int] = np.unique(bounds).tolist()
        self.fingerprint = documents.fingerprint

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._documents[int(self._numbers[index])]


def are_held_out(counts: Sequence[tuple[str, int]], fraction: float) -> npt.NDArray[np.bool_]:
    """Return for each document whether it is held out.

    A document is identified by its file and its number in it. A generator seeded by the name of the
    file draws a number for each of its documents, in order, so documents that are appended to a
    file, and files that are added, leave all others where they were.

    Raises:
        ConfigError: if `counts` are no pairs.
    """
    try:
        pairs = [(str(file), int(count)) for file, count in counts]
    except (TypeError, ValueError):
        raise ConfigError(
            f"`counts` of the documents are {counts!r:.80}; wanted a list of pairs: the name of "
            "each file, and its number of documents"
        ) from None
    draws = [np.random.Philox(key=_key(file)).random_raw(count) for file, count in pairs]
    return np.concatenate(draws) < np.uint64(fraction * 2**64)


def _key(file: str) -> int:
    return int.from_bytes(hashlib.sha256(file.encode()).digest()[:16], "little")


MOST_LEFT_OUT = 1000
"""Limit of consecutive skipped documents in a lane (or all documents); more are no accident."""
PARTS = 16
PART_DOCUMENTS = 2**16
"""Number of parts of an epoch, unless they would have more documents than this."""


class ShuffledDocuments(Shuffled):
    """Documents readable in any order, reshuffled each epoch."""

    def __init__(
        self, name: str, documents: Documents, *, seed: int, shuffle: bool, null_text: str = "error"
    ) -> None:
        self.nulls: NullTexts | None = NullTexts(null_text)
        about: Identity = {
            "dataset": name,
            "files": documents.fingerprint,
            "documents": len(documents),
        }
        super().__init__(documents.windows, about, seed=seed, shuffle=shuffle)
        self._documents = documents

    @property
    def part(self) -> str | None:
        """Number of documents out of all; None if these are all."""
        documents = self._documents
        if not isinstance(documents, DocumentsPart):
            return None
        return f"{len(documents):,} of {documents.total:,} documents"

    def epoch(self, position: Position) -> int:
        return position.round

    def passed(self, position: Position, lane: int, lanes: int) -> int:
        """Count a lane's documents up to and including the one at `position`."""
        number = position.round * len(self._documents) + position.document
        return (number - lane) // lanes + 1

    def parts(self) -> list[DocumentRange]:
        """Divide an epoch without shuffle into parts that can be read by themselves."""
        windows, count = self._documents.windows, len(self._documents)
        size = min(PART_DOCUMENTS, -(-count // PARTS))
        bounds = [0]
        for end in windows[1:-1] if len(windows) > 2 else range(size, count, size):
            if end - bounds[-1] >= size:
                bounds.append(end)
        pairs = itertools.pairwise([*bounds, count])
        return [DocumentRange(Position(0, begin), Position(0, end)) for begin, end in pairs]

    def advice(self, lanes: int) -> str | None:
        if (count := len(self._documents)) >= lanes:
            return None
        return (
            f"{count} document{'s' * (count > 1)} for {lanes} lanes: several lanes read the "
            "same documents at the same time; use more documents (a smaller "
            "data.document_bytes splits text files further) or a smaller batch"
        )

    def read(
        self, starts: Mapping[int, Position | None], lanes: int
    ) -> dict[int, Iterator[Document]]:
        return {
            lane: self._read(start or Position(0, lane), lanes) for lane, start in starts.items()
        }

    def _read(self, start: Position, lanes: int) -> Iterator[Document]:
        count = len(self._documents)
        number = start.round * count + start.document
        left_out = 0
        while True:
            epoch, place = divmod(number, count)
            content = self._content(epoch, int(self._order(epoch)[place]))
            if content is not None:
                left_out = 0
                yield Document(Position(epoch, place), content)
            elif (left_out := left_out + 1) == min(count, MOST_LEFT_OUT):
                raise ConfigError(f"data.dataset: {left_out} documents in a row cannot be read")
            number += lanes

    def _content(self, epoch: int, index: int) -> Any:
        """Return the content of a document in an epoch; None skips it."""
        try:
            return self._documents[index]
        except NullText as error:
            assert self.nulls is not None, "it has texts"
            return self.nulls.skip(error)


class SyntheticDocuments:
    """Random tokens: document j is a function of (seed, j)."""

    length = 4096

    def __init__(self, vocab_size: int, *, seed: int) -> None:
        self.identity: Identity = {"dataset": "synthetic", "vocab_size": vocab_size, "seed": seed}
        self._vocab_size = vocab_size
        self._seed = seed

    def epoch(self, position: Position) -> int:
        return position.round

    def read(
        self, starts: Mapping[int, Position | None], lanes: int
    ) -> dict[int, Iterator[Document]]:
        return {
            lane: self._read(start or Position(0, lane), lanes) for lane, start in starts.items()
        }

    def _read(self, start: Position, lanes: int) -> Iterator[Document]:
        index = start.document
        while True:
            draw = np.random.default_rng([self._seed, index])
            tokens = draw.integers(self._vocab_size, size=self.length, dtype=np.int32)
            yield Document(Position(0, index), tokens)
            index += lanes


@reading()
def open_source(config: DataConfig, tokenizer: Tokenizer | None, *, seed: int) -> Source:
    """Open the documents named by the section; ConfigError if they are unavailable.

    Args:
        tokenizer: the model's, if it reads text.
    """
    values = {".".join(key): told(value) for key, value in flat(config).items()}
    if found := [(values.get(p.path, ""), p.within("data")) for p in config.problems(Context())]:
        raise RecipeError(f"{p.path}: {got}{p.message}" for got, p in found)
    if (path := path_of(config)) is not None:
        source = _open_local(_on_disk(path, config), config, seed)
    else:
        description = DATASETS[config.dataset]
        source = SOURCES[description.kind](description, config, tokenizer, seed)
        require_parts(source, Source, f"the source {description.kind}")
    if config.validation_fraction and "validation_fraction" not in source.identity:
        raise ConfigError(f"data.validation_fraction: {NO_PART}")
    return source


def _open_synthetic(
    dataset: Dataset, config: DataConfig, tokenizer: Tokenizer | None, seed: int
) -> Source:
    assert tokenizer is not None, "the tokens are of some vocabulary"
    return SyntheticDocuments(tokenizer.vocab_size, seed=seed)


def _open_stdlib(
    dataset: Dataset, config: DataConfig, tokenizer: Tokenizer | None, seed: int
) -> Source:
    documents = python_stdlib(dataset.split, config.document_bytes, dataset.name or "")
    return _shuffled(dataset.kind, documents, config, seed)


def _open_hub(
    dataset: Dataset, config: DataConfig, tokenizer: Tokenizer | None, seed: int
) -> Source:
    name, found = config.dataset, load_hub(dataset, streaming=config.streaming)
    if config.streaming:
        return _streamed(name, name, found, config, seed)
    return _shuffled(name, DownloadedDocuments(name, found, config.text_key), config, seed)


@reading()
def check_local(config: DataConfig) -> None:
    """Check the files named by the section, if any, without reading all of them.

    Raises:
        ConfigError: if they cannot be read, with the reason.
    """
    if any(config.problems(Context())):
        return  # already reported
    path = path_of(config)
    if path is None:
        return
    if isinstance(path, RemotePath):  # its text is read once it has been fetched
        if not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder")
        return
    files, kind = _files_of(config, path)
    if kind == "compressed" and config.validation_fraction:
        raise ConfigError(f"{NO_PART} (data.validation_fraction); decompress the files")
    check_files(path, files, kind, config)


def path_of(config: DataConfig) -> Path | None:
    """Return the file or folder that the section reads; None for a data set without one."""
    description, path = DATASETS.get(config.dataset), config.dataset_path
    if description is None:
        path = config.dataset
    if path is None or (description and description.drawn):
        return None
    return path_to_read(path, hub.DATA)


@reading()
def stamps(config: DataConfig) -> list[Stamp]:
    """Return a stamp of each file that the section reads, if it names a file or folder."""
    path = path_of(config)
    if path is None:
        return []
    if isinstance(path, RemotePath):
        return [[name, *found] for name, found in sorted(path.tree().items())]
    files, _ = _files_of(config, path)
    return stamps_of([file.resolve() for file in files], path)


def _files_of(config: DataConfig, path: Path) -> tuple[list[Path], str]:
    """Find the files at `path`, and their kind, which the data set may determine."""
    named = DATASETS.get(config.dataset)
    return find_files(path, named.kind if named and named.kind in FORMATS else None)


def _on_disk(path: Path, config: DataConfig) -> Path:
    """Return the path of files; those at a URL are fetched."""
    if not isinstance(path, RemotePath):
        return path
    cache = local_path(config.cache) if config.cache else None
    return fetch_all(path, cache_folder(path, cache), int(config.cache_limit * GIB))


def _open_local(path: Path, config: DataConfig, seed: int) -> Source:
    files, kind = _files_of(config, path)
    if kind == "compressed":
        fingerprint = fingerprint_files(files, path if path.is_dir() else path.parent)
        lines = CompressedLines(files, config.text_key)
        source: Source = _streamed(str(path), fingerprint, lines, config, seed)
        source.identity["content"] = contents_of(files)
        return source
    documents = open_documents(
        path,
        files,
        kind,
        text_key=config.text_key,
        document_bytes=config.document_bytes,
        cache=local_path(config.cache) if config.cache else None,
    )
    source = _shuffled(kind, documents, config, seed)
    source.identity["content"] = contents_of(files)
    return source


def _shuffled(name: str, documents: Documents, config: DataConfig, seed: int) -> Source:
    if config.validation_fraction is None:
        return ShuffledDocuments(name, documents, **_order(config, seed))
    if not hasattr(documents, "counts"):
        raise ConfigError(f"data.validation_fraction: files of kind {name} have no `counts`")
    part = DocumentsPart(
        cast(CountedDocuments, documents), config.validation_fraction, config.is_held_out
    )
    source = ShuffledDocuments(name, part, **_order(config, seed))
    source.identity["validation_fraction"] = config.validation_fraction
    return source


def _streamed(
    name: str, fingerprint: str, dataset: Any, config: DataConfig, seed: int
) -> StreamedDocuments:
    return StreamedDocuments(name, fingerprint, dataset, config.text_key, **_order(config, seed))


def _order(config: DataConfig, seed: int) -> dict[str, Any]:
    return {"seed": seed, "shuffle": config.shuffle, "null_text": config.null_text}


OpenSource = Callable[[Dataset, DataConfig, Tokenizer | None, int], Source]
"""(data set, section, the model's tokenizer if it has one, seed) to the documents."""

SOURCES = Registry[OpenSource](
    "source", {"python_stdlib": _open_stdlib, "hub": _open_hub, "synthetic": _open_synthetic}
)
"""Functions that open a data set, by its kind; `data.dataset_path` opens files of any kind."""
