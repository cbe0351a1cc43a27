"""Collections of documents on local disk that can be read in any order: text, JSONL, Parquet.

Opening one finds the number of documents and their offsets, without parsing them; `collection[i]`
then reads just that document. Every mistake in a file is reported with its location.
"""

import codecs
import functools
import itertools
import json
import mmap
import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchtitan.config import ConfigError, Registry
from torchtitan.data.discovery import fingerprint_files


class Documents(Protocol):
    """Documents by number."""

    windows: list[int]
    """Ascending bounds of the windows inside which reading in any order is cheap."""
    fingerprint: str
    """Digest that changes with the files that the documents are read from."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class TextDocuments:
    """Plain text: a file is a document, or several if it is longer than `document_bytes`."""

    def __init__(self, files: Sequence[Path], document_bytes: int, root: Path) -> None:
        bounds = {file: _text_bounds(file, document_bytes) for file in files}
        self._pieces = [(file, *b) for file, found in bounds.items() for b in found]
        self.counts = [(_name(file, root), len(found)) for file, found in bounds.items()]
        self.windows = [0, len(self._pieces)]
        self.fingerprint = fingerprint_files(files, root) + f"/{document_bytes}"

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> str:
        path, begin, end = self._pieces[index]
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read(end - begin)
        if not begin:
            content = content.removeprefix(codecs.BOM_UTF8)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1 + _lines_before(path, begin)
            raise ConfigError(f"{path}:{line}: {not_text(error)}") from None


def _text_bounds(path: Path, document_bytes: int) -> list[tuple[int, int]]:
    """Return the start and end of the documents of a text file, in bytes; none if it is empty."""
    size = path.stat().st_size
    if size <= document_bytes:
        return [(0, size)] if size else []
    cuts = [0]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while size - cuts[-1] > document_bytes:
            target = cuts[-1] + document_bytes
            cut = data.rfind(b"\n", cuts[-1], target) + 1
            if not cut:  # no line ends in this window: cut at the start of a character
                cut = target
                while cut < size and data[cut] & 0xC0 == 0x80:
                    cut += 1
            cuts.append(cut)
    return [(a, b) for a, b in zip(cuts, [*cuts[1:], size], strict=True) if a < b]


def _lines_before(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return file.read(offset).count(b"\n")


class JsonlDocuments:
    """JSON Lines: one object per line, with its text under `text_key`."""

    def __init__(self, files: Sequence[Path], text_key: str, root: Path) -> None:
        self._text_key = text_key
        self._files = [path for path in files if path.stat().st_size]
        self._data: list[mmap.mmap] = []
        self._starts: list[npt.NDArray[np.int64]] = []
        for path in self._files:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._data.append(data)
            self._starts.append(_line_starts(data))
        self._ends = np.cumsum([0, *map(len, self._starts)])
        lines = zip(self._files, self._starts, strict=True)
        self.counts = [(_name(path, root), len(starts)) for path, starts in lines]
        self.windows = [0, len(self)]
        self.fingerprint = fingerprint_files(files, root) + f"/{text_key}"

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> str:
        number = int(np.searchsorted(self._ends, index, side="right")) - 1
        data = self._data[number]
        start = int(self._starts[number][index - self._ends[number]])
        end = data.find(b"\n", start)
        line = data[start : end if end >= 0 else len(data)]

        try:
            return text_of(line, self._text_key)
        except ConfigError as error:
            line_number = data[:start].count(b"\n") + 1
            raise ConfigError(f"{self._files[number]}:{line_number}: {error}") from None


def _line_starts(data: mmap.mmap, block: int = 1 << 26) -> npt.NDArray[np.int64]:
    """Return the start of each line that is not empty, in bytes."""
    content = np.frombuffer(data, dtype=np.uint8)
    breaks = [
        begin + np.flatnonzero(content[begin : begin + block] == ord("\n"))
        for begin in range(0, len(content), block)
    ]
    starts: npt.NDArray[np.int64] = np.concatenate(
        [np.zeros(1, np.int64), *(found + 1 for found in breaks)]
    )
    starts = starts[starts < len(content)]
    first = content[starts]
    filled: npt.NDArray[np.int64] = starts[(first != ord("\n")) & (first != ord("\r"))]
    return filled


class ParquetDocuments:
    """Parquet: one document per row, with its text in the column `text_key`.

    A row can only be decoded together with its row group, so the shuffle stays inside windows of a
    few groups, and the groups in use stay decoded.
    """

    window_rows = 8192

    def __init__(self, files: Sequence[Path], text_key: str, root: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self._text_key = text_key
        self._groups: list[tuple[Path, int]] = []
        self.counts: list[tuple[str, int]] = []
        sizes: list[int] = []
        for path in files:
            try:
                with pyarrow.parquet.ParquetFile(path) as file:
                    metadata, schema = file.metadata, file.schema_arrow
            except (pyarrow.ArrowException, OSError) as error:
                raise ConfigError(f"{path}: not a Parquet file: {error}") from None
            if text_key not in schema.names:
                names = ", ".join(schema.names)
                raise ConfigError(f"{path}: no column {text_key!r} (data.text_key); it has {names}")
            kind = schema.field(text_key).type
            text = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if "string" not in str(text) or pyarrow.types.is_nested(text):
                raise ConfigError(f"{path}: the column {text_key!r} has {kind}; wanted strings")
            self.counts.append((_name(path, root), metadata.num_rows))
            self._groups += [(path, group) for group in range(metadata.num_row_groups)]
            sizes += [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        self._ends = np.cumsum([0, *sizes])
        self.windows = [0]
        for end in self._ends[1:].tolist():
            if end - self.windows[-1] >= self.window_rows or end == len(self):
                self.windows.append(end)
        self.fingerprint = fingerprint_files(files, root) + f"/{text_key}"
        # Lanes are about in step, so they read from one window, or near its end from two.
        longest = max(
            (
                int(np.sum((self._ends > a) & (self._ends <= b)))
                for a, b in itertools.pairwise(self.windows)
            ),
            default=0,
        )
        self._group = functools.lru_cache(maxsize=2 * longest)(self._read_group)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> str:
        group = int(np.searchsorted(self._ends, index, side="right")) - 1
        try:
            text = self._group(group)[index - int(self._ends[group])].as_py()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._groups[group][0]}: {not_text(error)}") from None
        if not isinstance(text, str):
            path, first = self._groups[group][0], self._groups.index((self._groups[group][0], 0))
            row = {self._text_key: text}
            place = f"{path}: row {index - int(self._ends[first]) + 1}"
            raise ConfigError(f"{place}: {wrong_text(row, self._text_key)}")
        return text

    def _read_group(self, group: int) -> Any:
        import pyarrow
        import pyarrow.parquet

        path, number = self._groups[group]
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                rows = file.read_row_group(number, columns=[self._text_key]).column(0)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path}: row group {number + 1} is damaged: {error}") from None
        if len(rows) != (recorded := int(self._ends[group + 1] - self._ends[group])):
            raise ConfigError(
                f"{path}: row group {number + 1} is damaged: it has {len(rows)} rows, and the "
                f"file says {recorded}"
            )
        return rows


def _name(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix()


def not_text(error: UnicodeDecodeError) -> str:
    """Return the error text for invalid UTF-8."""
    is_wide = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    hint = "; is it UTF-16?" if is_wide else ""
    return f"not UTF-8 text ({error.reason} 0x{error.object[error.start]:02x}){hint}"


def text_of(line: bytes, text_key: str) -> str:
    """Return the text of a line of JSON.

    Raises:
        ConfigError: if it has none, with the reason.
    """
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise ConfigError(not_text(error)) from None
    except (ValueError, RecursionError) as error:
        is_begun = line.strip() in (b"{", b"[") or line.lstrip()[:1] == b"["
        hint = "; wanted JSON Lines, a whole object on each line" if is_begun else ""
        raise ConfigError(f"not a line of JSON: {error}{hint}") from None
    if not isinstance(row, dict):
        hint = "; wanted JSON Lines, an object on each line" if isinstance(row, list) else ""
        raise ConfigError(f"not a JSON object, but {type(row).__name__}{hint}")
    if not isinstance(row.get(text_key), str):
        raise ConfigError(wrong_text(row, text_key))
    return clean(row[text_key])


def wrong_text(row: dict[str, Any], text_key: str) -> str:
    """Return the error text for a row whose text is absent or not a string."""
    if text_key not in row:
        return f"no key {text_key!r} (data.text_key); it has {', '.join(map(repr, row))}"
    return f"{text_key!r} is not a string, but {type(row[text_key]).__name__}"


def clean(text: str) -> str:
    """Replace half surrogates in `text`, valid in JSON but in no encoding, by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


OpenFiles = Callable[[Sequence[Path], Path, str, int], Documents]
"""(files, their folder, `data.text_key`, `data.document_bytes`) to the documents."""

FORMATS = Registry[OpenFiles](
    "format",
    {
        "text": lambda files, root, key, size: TextDocuments(files, size, root),
        "jsonl": lambda files, root, key, size: JsonlDocuments(files, key, root),
        "parquet": lambda files, root, key, size: ParquetDocuments(files, key, root),
    },
)
"""Functions that open files, by kind: see `torchtitan.data.discovery.SUFFIXES`."""


def open_documents(
    path: Path, files: Sequence[Path], kind: str, *, text_key: str, document_bytes: int
) -> Documents:
    """Open the documents in `files`, all of one kind, which `find_files` found at `path`."""
    root = path if path.is_dir() else path.parent
    documents = FORMATS[kind](files, root, text_key, document_bytes)
    if not len(documents):
        raise ConfigError(f"{path} holds no documents: its {kind} files are empty")
    return documents


def python_stdlib(split: str, document_bytes: int) -> Documents:
    """Open the source files of the running Python's standard library; every 20th is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    names: list[str] = []
    for folder, subfolders, found in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        place = Path(folder).relative_to(root)
        names += [(place / name).as_posix() for name in found if name.endswith(".py")]
    if not names:
        raise RuntimeError(f"this Python has no standard library as source files under {root}")
    files = [root / name for name in sorted(names)]
    held_out = set(files[19::20])
    chosen = [file for file in files if (file in held_out) == (split == "validation")]
    return TextDocuments(chosen, document_bytes, root)
