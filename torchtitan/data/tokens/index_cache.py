"""Opening of tokenized documents, with an index that one process builds for all."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

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
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.tokens.checksums import of_one_dtype, record_small
from torchtitan.data.tokens.formats import TOKEN_FORMATS, OwnFormat, TokenFormat, root_of
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
        raise ConfigError(
            f"the format {format.name}: {type(format).__name__} has no tables; add it"
        )
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
                    tables = of_one_dtype(root, format.tables(local, tokenizer))
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
