"""Local copies of remote files, in a folder that all processes of a node share.

A file is fetched when it is first needed, as a whole. It appears under its name only when it is
complete and has the right size. When the copies would exceed the limit, they are deleted in order
of their last use. A process that still has one of them open can read it until it closes it.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import random
import resource
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from torchtitan.config import ConfigError, Unreachable
from torchtitan.logging import logger
from torchtitan.remote import HOPELESS, RemotePath, StoreError, dangling, refuse_pointer

GIB = 2**30
BLOCK = 32 * 2**20
"""Bytes of a file that are fetched at a time."""
CACHE_LIMIT = 256.0
"""Default of `data.cache_limit`, in GiB."""

OPEN_FILES = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
"""Maximum number of data files that a process keeps open."""

UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
UNWRITABLE |= {errno.EEXIST, errno.ENOENT, errno.ENOTDIR}
"""Errors of a disk that is full, or must not be written, or of a path that can be no folder."""
DIGESTS, DIGESTED = 5, 2**14
"""Number and bytes of the blocks of a file that stand for its content, the first and last among
them."""
PREFETCHERS = 2
"""Number of threads of a process that fetch files ahead of time."""

Stamp = list[str | int]
"""A file's name, size, and version, or time of modification and digest of a few blocks."""


def cache_folder(path: Path | None, cache: Path | None) -> Path:
    """Return the folder for what is derived from the data at `path`: `cache` unless it is None.

    Args:
        path: None if the data has no folder of its own.
    """
    if cache is not None:
        return cache
    if path is None or isinstance(path, RemotePath):
        user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return user / "torchtitan/data"
    return (path if path.is_dir() else path.parent) / ".torchtitan"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file or folder that one process makes and all others wait for.

    Raises:
        ConfigError: if it cannot be made.
    """
    with writing(path.parent), contextlib.ExitStack() as held:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = held.enter_context(path.with_name(f"{path.name}.lock").open("a", encoding="utf-8"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = held.pop_all()
    with held:
        yield


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn errors of a disk that is full or cannot be written into errors that name the setting."""
    try:
        yield
    except ConfigError:
        raise
    except OSError as error:
        is_readable = error.errno not in UNWRITABLE
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror}"
            + ("" if is_readable else "; free some space, or set data.cache to another folder")
        ) from None


@contextlib.contextmanager
def reading(path: Path | None = None) -> Iterator[None]:
    """Turn an error of the disk while data is read into one that names the file.

    Args:
        path: what is read, if the error does not say it.
    """
    try:
        yield
    except ConfigError:
        raise
    except OSError as error:
        if not (named := error.filename or path):
            raise
        why = dangling(named) or f"{named}: cannot be read: {error.strerror or error}"
        raise ConfigError(why) from None


def stamps_of(files: Sequence[Path], root: Path) -> list[Stamp]:
    """Return a stamp of each file below `root`, which differs if the file has changed."""
    if isinstance(root, RemotePath):
        tree = root.tree()
        return [[str(file), *tree[file.relative_to(root).as_posix()]] for file in files]
    found = [(file, file.stat()) for file in files]
    return [
        [str(file), status.st_size, status.st_mtime_ns, content_of(file)] for file, status in found
    ]


def content_of(file: Path) -> str:
    """Return a digest of a few blocks of a file; of all its bytes up to 80 KiB."""
    digest = xxhash.xxh3_64()
    with reading(file), file.open("rb", buffering=0) as stream:
        last = max(0, os.fstat(stream.fileno()).st_size - DIGESTED)
        for number in range(DIGESTS if last else 1):
            stream.seek(last * number // (DIGESTS - 1))
            digest.update(stream.read(DIGESTED))
    return digest.hexdigest()


def contents_of(files: Sequence[Path]) -> str:
    """Return a digest of blocks of `files`; of evenly spread ones if there are more than 1,000."""
    chosen = files[:: -(-len(files) // 1000) or 1]
    return xxhash.xxh3_64_hexdigest(" ".join(map(content_of, chosen)).encode())


def fetch_all(path: RemotePath, cache: Path, limit: int) -> Path:
    """Fetch the file at `path`, or all files in that folder, unless that has been done.

    Args:
        limit: maximum bytes of all files.

    Returns:
        the file or folder in `cache`.
    """
    found = path.tree()
    is_file = "." in found
    root = path.parent if is_file else path
    tree = {path.name: found["."]} if is_file else found
    tree = {name: stamp for name, stamp in tree.items() if "/." not in f"/{name}"}
    if not tree:
        raise ConfigError(f"{path}: there is no such file or folder")
    if (total := sum(size for size, _ in tree.values())) > limit:
        raise ConfigError(
            f"{path} has {total / GIB:.3g} GiB of text, more than data.cache_limit = "
            f"{limit / GIB:g}; raise it, or tokenize the text (torchtitan data tokenize) and read "
            "the tokens, which are fetched as they are needed"
        )
    place, version = (
        hashlib.sha256(text.encode()).hexdigest()[:12] for text in (str(path), json.dumps(tree))
    )
    folder = cache / f"text-{root.name}-{place}-{version}"
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        used = Path(f"{folder}.used")
        with used.open("a+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            _text_in_use(cache, place)[:] = [LocalFile(used, lock)]  # which holds the lock
    with locked(folder):
        missing = [name for name in tree if not (folder / name).is_file()]
        if missing:
            logger.info("data: fetching %s (%d files)", path, len(missing))
            with locked(cache / "files"):
                for other in cache.glob(f"text-*-{place}-*/"):
                    if other != folder:
                        _delete_text(other)
                _trim(cache, limit - sum(tree[name][0] for name in missing))
        with ThreadPoolExecutor(8) as threads:
            for _ in threads.map(lambda n: fetch(root / n, tree[n][0], folder / n), missing):
                pass
        with writing(folder):
            os.utime(folder)  # the time of its last use
    return folder / path.name if is_file else folder


@functools.cache
def _text_in_use(cache: Path, place: str) -> "list[LocalFile]":
    """Return a list for the lock of the version of some text that this process reads."""
    return []


def _delete_text(folder: Path) -> bool:
    """Delete a copy of text, unless a process reads it."""
    with Path(f"{folder}.used").open("a", encoding="utf-8") as used:
        try:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        shutil.rmtree(folder, ignore_errors=True)
    return True


def _trim(cache: Path, limit: int) -> None:
    """Delete copies of shards and text in order of their last use, down to the limit."""
    found: list[tuple[int, int, Path]] = []
    for folder in (cache / "files", *cache.glob("text-*/")):
        copies = []
        for path in (Path(inside, name) for inside, _, names in os.walk(folder) for name in names):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                copies.append((status.st_mtime_ns, status.st_size, path))
        if folder.name != "files":  # text is read by its path, so it is deleted as a whole
            copies = [(folder.stat().st_mtime_ns, sum(size for _, size, _ in copies), folder)]
        found += copies
    excess = sum(size for _, size, _ in found) - limit
    for _, freed, path in sorted(found):
        delete = _delete_text if path.parent == cache else _delete
        if excess > 0 and delete(path):
            excess -= freed


def fetch(
    remote: Path, size: int, file: Path, reserve: Callable[[BinaryIO], None] | None = None
) -> None:
    """Fetch a remote file, unless another process has just done so.

    Args:
        size: bytes that it must have.
        reserve: called with the empty file.

    Raises:
        ConfigError: if it is gone, has another size, or the disk is full.
        Unreachable: if the store does not answer.
    """
    unfinished = file.with_name(f"{file.name}.unfinished")
    with writing(file.parent), contextlib.ExitStack() as undo:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT, 0o666)
        target = undo.enter_context(os.fdopen(descriptor, "r+b", 0))
        fcntl.flock(target, fcntl.LOCK_EX)  # held until closed: one process fetches
        if not _is_at(target, unfinished):
            return
        undo.callback(unfinished.unlink, missing_ok=True)
        os.ftruncate(descriptor, 0)
        if reserve is not None:
            reserve(target)
        _fetch_into(target, remote, size)
        unfinished.rename(file)


def _fetch_into(target: BinaryIO, remote: Path, size: int) -> None:
    logger.debug("data: fetching %s (%.1f MiB)", remote, size / 2**20)
    try:
        if size:
            os.posix_fallocate(target.fileno(), 0, size)
        with remote.open("rb", buffering=0) as source:
            if (found := source.seek(0, os.SEEK_END)) != size:
                raise ConfigError(
                    f"{remote}: has {found:,} bytes; wanted {size:,}; it has changed or is "
                    "truncated"
                )
            source.seek(0)
            shutil.copyfileobj(source, target, BLOCK)
        os.fsync(target.fileno())
    except StoreError as error:
        if isinstance(error.__cause__, HOPELESS):
            raise
        raise Unreachable(f"cannot fetch {error}") from error
    except FileNotFoundError:
        raise ConfigError(f"{remote}: there is no such file; was it deleted?") from None


@dataclass(frozen=True)
class FileCache:
    """Copies of the files of a remote folder, in a cache with one limit for all folders."""

    root: RemotePath
    version: str
    """Digest that differs if the remote files do; copies of other versions are not used."""
    cache: Path
    limit: int
    """Bytes of all copies in the cache."""

    @property
    def name(self) -> str:
        """Name of the folder of the copies of `root`."""
        key = hashlib.sha256(f"{self.root} {self.version}".encode()).hexdigest()[:12]
        return f"{self.root.name}-{key}"

    def open(self, name: str, size: int) -> BinaryIO:
        """Open the copy of a file in `root`, which is fetched if there is none.

        Args:
            size: bytes that it must have.
        """
        copy = self.cache / "files" / self.name / name
        while True:
            with contextlib.suppress(FileNotFoundError):
                file = copy.open("rb")
                if os.fstat(file.fileno()).st_size == size:
                    os.utime(file.fileno())  # the time of its last use
                    return file
                file.close()
            fetch(self.root / name, size, copy, lambda target: self._reserve(target, size))

    def _reserve(self, target: BinaryIO, size: int) -> None:
        """Delete copies in order of their last use if they would exceed the limit with this one."""
        with locked(self.cache / "files"):
            os.ftruncate(target.fileno(), size)  # so that other processes count it
            _trim(self.cache, self.limit)

    def path(self, path: Path) -> Path:
        """Return `path`, in `root`, such that opening it as a local file opens its copy."""
        opened = self

        class CachedPath(RemotePath):
            def __fspath__(self) -> str:
                name = "/".join(self.parts[len(opened.root.parts) :])
                with opened.open(name, self.stat().st_size) as file:
                    return str(file.name)

        return CachedPath(*path.parts)


class Prefetcher:
    """Fetches files that will be read, in the background; a new request replaces the last one.

    Their order is random, so that the processes of a node fetch different ones.
    """

    def __init__(self, cache: FileCache) -> None:
        self._cache, self._lock = cache, threading.Lock()
        self._wanted: list[tuple[str, int]] = []
        self._threads: list[threading.Thread] = []

    def request(self, files: Sequence[tuple[str, int]]) -> None:
        """Fetch files, given their names and sizes."""
        with self._lock:
            self._wanted = random.SystemRandom().sample(files, len(files))
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            for _ in range(PREFETCHERS - len(self._threads)):
                thread = threading.Thread(target=self._run, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    return
                file = self._wanted.pop()
            try:
                self._cache.open(*file).close()
            except (ConfigError, Unreachable, OSError) as error:
                logger.debug("data: not fetched ahead of time: %s", error)  # reading it raises
                return


class LocalFile:
    """File that is open for reading, until there is no reference to it."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        with file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self.path, self.size = path, os.fstat(self._descriptor).st_size

    def read(self, start: int, count: int) -> bytes:
        """Read `count` bytes.

        Raises:
            ConfigError: if the disk fails, or the file ends before.
        """
        content = b""
        while len(content) < count:
            try:
                part = os.pread(self._descriptor, count - len(content), start + len(content))
            except OSError as error:
                raise ConfigError(f"{self.path}: byte {start:,}: cannot be read: {error}") from None
            if not part:
                raise ConfigError(
                    f"{self.path}: byte {start + len(content):,}: the file ends here; it has been "
                    "truncated"
                )
            content = content + part if content else part
        return content


@functools.lru_cache(maxsize=OPEN_FILES)
def open_file(
    owner: object, root: Path, name: str, size: int | None = None, cache: FileCache | None = None
) -> LocalFile:
    """Open a file in `root`, or its copy in `cache`; open files are shared within an owner.

    Args:
        size: bytes that it must have.

    Raises:
        ConfigError: if it cannot be opened, or has another size.
    """
    path = root / name
    if cache is not None:
        assert size is not None, "remote files are verified"
        return LocalFile(path, cache.open(name, size))
    try:
        file = LocalFile(path, path.open("rb"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if size is not None and file.size != size:
        refuse_pointer(path)
        raise ConfigError(
            f"{path}: has {file.size:,} bytes; wanted {size:,}; it has changed or is truncated"
        )
    return file


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file has this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _delete(path: Path) -> bool:
    """Delete a copy, unless a process is fetching it."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not _is_at(file, path):
            return False
        path.unlink()
    return True
