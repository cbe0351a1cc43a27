"""Collections of documents on local disk that can be read in any order: text, JSONL, Parquet.

Opening one finds the number of documents and their offsets, without parsing them; `collection[i]`
then reads just that document. Every mistake in a file is reported with its location.
"""

import codecs
import functools
import hashlib
import inspect
import io
import itertools
import json
import mmap
import os
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchtitan.config import ConfigError, Registry, allowed_names, lacks
from torchtitan.data.discovery import fingerprint_files
from torchtitan.data.file_cache import (
    OPEN_FILES,
    cache_folder,
    content_of,
    locked,
    open_file,
    writing,
)
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


class Documents(Protocol):
    """Documents by number."""

    windows: list[int]
    """Ascending bounds of the windows inside which reading in any order is cheap."""
    fingerprint: str
    """Digest that changes with the files that the documents are read from."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class FileParts:
    """Consecutive parts of files, by number; each is a document."""

    def __init__(
        self,
        files: Sequence[Path],
        starts: Callable[[Path], npt.NDArray[np.int64]],
        root: Path,
        setting: str | int,
    ) -> None:
        """
        Args:
            starts: returns the first byte of each part of a file.
            setting: what the documents depend on besides the files.
        """
        self.fingerprint = f"{fingerprint_files(files, root)}/{setting}"
        self._root, self._owner = root, object()
        self._files = [file for file in files if file.stat().st_size]
        self._sizes = [file.stat().st_size for file in self._files]
        found = map(starts, self._files)
        # A mapped array keeps a file open, so few of them are.
        kept = [(len(each), None if isinstance(each, np.memmap) else each) for each in found]
        self._starts = [each for _, each in kept]
        self._mapped = functools.lru_cache(maxsize=OPEN_FILES)(starts)
        names = (_name(file, root) for file in self._files)
        self.counts = [(name, count) for name, (count, _) in zip(names, kept, strict=True)]
        self._ends = np.cumsum([0, *(count for count, _ in kept)])
        self.windows = [0, len(self)]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> tuple[Path, int, bytes]:
        """Return the file, first byte and content of a part.

        Raises:
            ConfigError: if the file has been deleted or truncated.
        """
        number = int(np.searchsorted(self._ends, index, side="right")) - 1
        name, count = self.counts[number]
        path = self._files[number]
        try:
            if (starts := self._starts[number]) is None:
                starts = self._mapped(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        if len(starts) != count:
            raise ConfigError(f"{path}: it has changed since the run was started")
        place = index - int(self._ends[number])
        start, is_last = int(starts[place]), place + 1 == len(starts)
        end = self._sizes[number] if is_last else int(starts[place + 1])
        file = open_file(self._owner, self._root, name)
        return path, start, file.read(start, end - start)


class TextDocuments(FileParts):
    """Plain text: a file is a document, or several if it is longer than `document_bytes`."""

    def __init__(self, files: Sequence[Path], document_bytes: int, root: Path) -> None:
        cut = functools.partial(_text_starts, document_bytes=document_bytes)
        super().__init__(files, cut, root, document_bytes)

    def __getitem__(self, index: int) -> str:
        path, begin, content = self.read(index)
        if not begin:
            content = content.removeprefix(codecs.BOM_UTF8)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1 + _lines_before(path, begin)
            raise ConfigError(f"{path}:{line}: {not_text(error)}") from None


def _text_starts(path: Path, document_bytes: int) -> npt.NDArray[np.int64]:
    """Return the start of each document of a text file, in bytes."""
    size = path.stat().st_size
    cuts = [0]
    if size <= document_bytes:
        return np.array(cuts)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while size - cuts[-1] > document_bytes:
            target = cuts[-1] + document_bytes
            cut = data.rfind(b"\n", cuts[-1], target) + 1
            if not cut:  # no line ends in this window: cut at the start of a character
                cut = target
                while cut < size and data[cut] & 0xC0 == 0x80:
                    cut += 1
            cuts.append(cut)
    return np.array([cut for cut in cuts if cut < size])


def _lines_before(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return file.read(offset).count(b"\n")


class JsonlDocuments(FileParts):
    """JSON Lines: one object per line, with its text under `text_key`."""

    def __init__(
        self, files: Sequence[Path], text_key: str, root: Path, cache: Path | None = None
    ) -> None:
        """
        Args:
            cache: folder for the indices of the lines. Default: next to each file.
        """
        self._text_key = text_key
        super().__init__(files, functools.partial(line_starts, cache=cache), root, text_key)

    def __getitem__(self, index: int) -> str:
        path, start, content = self.read(index)
        try:
            return text_of(content.partition(b"\n")[0], self._text_key)
        except ConfigError as error:
            line = _lines_before(path, start) + 1
            raise type(error)(f"{path}:{line}: {error}") from None


class ParquetDocuments:
    """Parquet: one document per row, with its text in the column `text_key`.

    A row can only be decoded together with its row group, so the shuffle stays inside windows of a
    few groups, and the groups in use stay decoded: in memory, or in a file if they are large.
    """

    window_rows = 8192
    window_bytes = 2**28
    """Text of a window up to which it is decoded into memory."""
    batch_bytes = 2**24
    """Text that is decoded at a time into a file."""

    def __init__(
        self, files: Sequence[Path], text_key: str, root: Path, cache: Path | None = None
    ) -> None:
        """
        Args:
            cache: folder for row groups that are too large for memory. Default: next to the file.
        """
        import pyarrow
        import pyarrow.parquet

        self._text_key, self._cache = text_key, cache
        self._groups: list[tuple[Path, int]] = []
        self.nulls = 0
        """Number of rows without text, as far as the files say it."""
        self.counts: list[tuple[str, int]] = []
        sizes: list[int] = []
        self._bytes: list[int] = []
        for path in files:
            try:
                with pyarrow.parquet.ParquetFile(path) as file:
                    metadata, schema = file.metadata, file.schema_arrow
            except (pyarrow.ArrowException, OSError) as error:
                raise ConfigError(f"{path}: not a Parquet file: {error}") from None
            if (count := schema.names.count(text_key)) != 1:
                many, names = f"{count} columns" if count else "no column", ", ".join(schema.names)
                raise ConfigError(f"{path}: {many} {text_key!r} (data.text_key); it has {names}")
            kind = schema.field(text_key).type
            text = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if "string" not in str(text) or pyarrow.types.is_nested(text):
                raise ConfigError(f"{path}: the column {text_key!r} has {kind}; wanted strings")
            self.counts.append((_name(path, root), metadata.num_rows))
            self._groups += [(path, group) for group in range(metadata.num_row_groups)]
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            sizes += [group.num_rows for group in groups]
            paths = [metadata.schema.column(n).path for n in range(metadata.num_columns)]
            columns = [group.column(paths.index(text_key)) for group in groups]
            self._bytes += [column.total_uncompressed_size for column in columns]
            found = [column.statistics for column in columns]
            self.nulls += sum((known and known.null_count) or 0 for known in found)
        self._ends = np.cumsum([0, *sizes])
        self.windows = [0]
        for end in self._ends[1:].tolist():
            if end - self.windows[-1] >= self.window_rows or end == len(self):
                self.windows.append(end)
        self.fingerprint = fingerprint_files(files, root) + f"/{text_key}"
        groups_of = itertools.pairwise(np.searchsorted(self._ends, self.windows).tolist())
        spans = [range(first, end) for first, end in groups_of]
        self._large = {
            group
            for span in spans
            if sum(self._bytes[group] for group in span) > self.window_bytes
            for group in span
        }
        # Lanes are about in step, so they read from one window, or near its end from two.
        longest = max(map(len, spans), default=0)
        self._group = functools.lru_cache(maxsize=2 * longest)(self._read_group)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> str:
        group = int(np.searchsorted(self._ends, index, side="right")) - 1
        try:
            text = self._group(group)[index - int(self._ends[group])].as_py()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._place(index, group)}: {not_text(error)}") from None
        if not isinstance(text, str):
            row = {self._text_key: text}
            raise wrong_text(row, self._text_key, f"{self._place(index, group)}: ")
        return text

    def _place(self, index: int, group: int) -> str:
        path = self._groups[group][0]
        first = int(self._ends[self._groups.index((path, 0))])
        return f"{path}: row {index - first + 1}"

    def _read_group(self, group: int) -> Any:
        import pyarrow
        import pyarrow.parquet

        path, number = self._groups[group]
        is_large, how = group in self._large, dict[str, Any]()
        try:
            if is_large:
                # Without a buffer, all compressed bytes of the group are read first.
                how = {"buffer_size": self.batch_bytes, "metadata": _without_dictionaries(path)}
            with pyarrow.parquet.ParquetFile(path, **how) as file:
                rows = self._decode_into_file(file, group) if is_large else None
                if rows is None:
                    rows = file.read_row_group(number, columns=[self._text_key]).column(0)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path}: row group {number + 1} is damaged: {error}") from None
        if len(rows) != (recorded := int(self._ends[group + 1] - self._ends[group])):
            raise ConfigError(
                f"{path}: row group {number + 1} is damaged: it has {len(rows)} rows, and the "
                f"file says {recorded}"
            )
        return rows

    def _decode_into_file(self, parquet: Any, group: int) -> Any:
        """Decode a row group a batch at a time, and return its rows, mapped from an unnamed file.

        Returns:
            None if the file cannot be written.
        """
        import pyarrow

        path, number = self._groups[group]
        folder = cache_folder(path, self._cache)
        count = int(self._ends[group + 1] - self._ends[group])
        batch_rows = max(1, count * self.batch_bytes // max(1, self._bytes[group]))
        kind = parquet.schema_arrow.field(self._text_key).type
        if pyarrow.types.is_dictionary(kind):  # batches may have different ones
            logger.warning(
                "data: %s: %s is of Arrow's dictionary type, and all of it stays in memory; write "
                "the file again with plain strings",
                path,
                self._text_key,
            )
            kind = kind.value_type
        schema = pyarrow.schema([(self._text_key, kind)])
        try:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            with file, pyarrow.ipc.new_file(file, schema) as writer:
                for batch in parquet.iter_batches(batch_rows, [number], [self._text_key]):
                    rows = pyarrow.record_batch([batch.column(0).cast(kind)], schema=schema)
                    with writing(folder):
                        writer.write_batch(rows)
                writer.close()
                file.flush()
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ConfigError as error:
            what = f"all of row group {number + 1}, {self._bytes[group] / 2**30:.2g} GiB,"
            logger.warning("data: %s: %s is kept in memory: %s", path, what, error)
            return None
        return pyarrow.ipc.open_file(pyarrow.py_buffer(content)).read_all().column(0)


def _without_dictionaries(path: Path) -> Any:
    """Return the metadata of a Parquet file, by which dictionaries of strings are read as strings.

    As dictionaries, those of all batches that were read would stay in memory.

    Returns:
        None if it has none, or other columns that only Arrow's own metadata describes.
    """
    import pyarrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        found, schema = file.metadata, file.schema_arrow
    if not any(map(pyarrow.types.is_dictionary, schema.types)):
        return None
    fields = [
        field.with_type(field.type.value_type) if pyarrow.types.is_dictionary(field.type) else field
        for field in schema
    ]
    content = io.BytesIO()
    pyarrow.parquet.ParquetWriter(content, pyarrow.schema(fields), store_schema=False).close()
    plain = pyarrow.parquet.read_metadata(content)
    try:
        plain.append_row_groups(found)
    except RuntimeError:  # the schemas differ
        return None
    return plain


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
        raise wrong_text(row, text_key)
    return clean(row[text_key])


class NullText(ConfigError):
    """Error for a row whose text is null, which is skipped if `data.null_text` says so."""


def wrong_text(row: dict[str, Any], text_key: str, where: str = "") -> ConfigError:
    """Return the error for a row, found at `where`, whose text is absent or not a string."""
    if text_key not in row:
        names = ", ".join(map(repr, row)) or "none"
        return ConfigError(f"{where}no key {text_key!r} (data.text_key); it has {names}")
    if row[text_key] is None:
        return NullText(f'{where}{text_key!r} is null; set data.null_text = "skip" to skip such')
    return ConfigError(f"{where}{text_key!r} is not a string, but {type(row[text_key]).__name__}")


class NullTexts:
    """Texts that are null, as `data.null_text` treats them."""

    def __init__(self, rule: str) -> None:
        self._rule, self.count = rule, 0

    def skip(self, error: ConfigError) -> str:
        """Count a document, and return the empty text that is read instead.

        Raises:
            ConfigError: `error`, if it is another or the document may not be skipped.
        """
        if self._rule == "error" or not isinstance(error, NullText):
            raise error
        self.count += 1
        if str(self.count).rstrip("0") == "1":  # 1, 10, 100, ...
            place = str(error).partition("; ")[0]
            logger.warning("data: skipped a document: %s (%d so far)", place, self.count)
        return ""


def clean(text: str) -> str:
    """Replace half surrogates in `text`, valid in JSON but in no encoding, by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def require_parts(opened: object, protocol: Any, what: str) -> None:
    """Refuse what an entry of a registry, `what`, has opened, if it lacks parts of a protocol."""
    if lacking := lacks(opened, protocol):
        raise ConfigError(f"{what}: {type(opened).__name__} {lacking}")


OpenFiles = Callable[[Sequence[Path], Path, str, int], Documents]
"""(files, their folder, `data.text_key`, `data.document_bytes`) to the documents.

A function may also have the argument `cache`: the folder for indices, None for the default.
"""


def _indexed(kind: Callable[..., Documents]) -> Callable[..., Documents]:
    return lambda files, root, key, size, cache=None: kind(files, key, root, cache)


FORMATS = Registry[OpenFiles](
    "format",
    {
        "text": lambda files, root, key, size: TextDocuments(files, size, root),
        "jsonl": _indexed(JsonlDocuments),
        "parquet": _indexed(ParquetDocuments),
    },
)
"""Functions that open files, by kind: see `torchtitan.data.discovery.SUFFIXES`."""


def open_documents(
    path: Path,
    files: Sequence[Path],
    kind: str,
    *,
    text_key: str,
    document_bytes: int,
    cache: Path | None = None,
) -> Documents:
    """Open the documents in `files`, all of one kind, which `find_files` found at `path`.

    Args:
        cache: folder for the indices of files, `data.cache`.
    """
    root = path if path.is_dir() else path.parent
    if kind not in FORMATS:
        raise ConfigError(f"{path}: no format is called {kind}; {allowed_names(kind, FORMATS)}")
    opened: Callable[..., Documents] = FORMATS[kind]
    if "cache" in inspect.signature(opened).parameters:
        opened = functools.partial(opened, cache=cache)
    documents = opened(files, root, text_key, document_bytes)
    require_parts(documents, Documents, f"the format {kind}")
    if not len(documents):
        raise ConfigError(f"{path} holds no documents: its {kind} files are empty")
    return documents


def python_stdlib(split: str, document_bytes: int, folder: str = "") -> Documents:
    """Open source files of the running Python's standard library; every 20th is held out.

    Args:
        folder: read only this folder of it.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) / folder
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    names: list[str] = []
    for inside, subfolders, found in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        place = Path(inside).relative_to(root)
        names += [(place / name).as_posix() for name in found if name.endswith(".py")]
    if not names:
        raise RuntimeError(f"this Python has no standard library as source files under {root}")
    files = [root / name for name in sorted(names)]
    held_out = set(files[19::20])
    chosen = [file for file in files if (file in held_out) == (split == "validation")]
    return TextDocuments(chosen, document_bytes, root)
