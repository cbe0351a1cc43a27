"""Paths on object stores, by fsspec (https://filesystem-spec.readthedocs.io): `s3://bucket/run`.

A `RemotePath` is a `Path` whose file operations use the store, and read only the requested bytes.
Client libraries' errors have no common base, so every error except a missing file becomes a
`StoreError`, an `OSError` like a disk's. fsspec is imported only when a URL is used.
"""

import errno
import hashlib
import io
import os
import re
import stat
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath, PurePosixPath
from typing import TYPE_CHECKING, Any

from torchtitan.config import ConfigError, hub, is_hub_id, local_path, shorten
from torchtitan.config.node_files import ONLY_POINTER, POINTER
from torchtitan.config.words import nearest
from torchtitan.packages import install

if TYPE_CHECKING:
    from typing import Self

URL = re.compile(r"([a-zA-Z][\w.+:-]*)://(/?)(.*)", re.DOTALL)
ATTEMPTS = 4
RETRY_SECONDS = 1.0
"""Delay before the first retry of a request; doubled for each further one."""
PART = 8 * 2**20
"""Bytes per request; a longer range is read by several at once."""
AT_ONCE = 8
"""Number of concurrent requests, if the filesystem supports them."""
HOPELESS = (FileExistsError, PermissionError, ImportError, ValueError, NotImplementedError)
"""Errors that a retry would raise again."""


class StoreError(ConfigError, OSError):
    """Error of a failed request to an object store; the message names the URL."""


def is_url(text: str) -> bool:
    """Whether a setting is a URL rather than a path."""
    return URL.match(text) is not None


def location(text: str) -> Path:
    """Return the path that a setting or an argument names: on a disk, or by a URL."""
    match = URL.match(text)
    if match is None:
        return local_path(text)
    protocol, root, rest = match.groups()
    return RemotePath(f"{protocol}:{':' if root else ''}", *rest.split("/"))


def path_to_read(text: str, files: hub.RepositoryFiles = hub.WEIGHTS) -> Path:
    """Return the path to read that a setting or an argument names, also as a repository of the hub.

    Args:
        files: those of the repository.

    Raises:
        ConfigError: if a repository cannot be read.
    """
    return hub.folder(text, files) if is_hub_id(text) else location(text)


def problem_of_url(url: str) -> str | None:
    """Return the reason why a URL's filesystem is not available, or None."""
    from fsspec.registry import get_filesystem_class, known_implementations, registry

    match = URL.match(url)
    assert match, url
    for protocol in match[1].split("::"):
        if protocol not in registry and protocol not in known_implementations:
            known = [f"{name}://" for name in (*registry, *known_implementations)]
            near = nearest(f"{protocol}://", known) or "; wanted one like s3://, gs:// or az://"
            return f"fsspec has no filesystem {shorten(protocol)}://{near}"
        try:
            get_filesystem_class(protocol)
        except ImportError as error:
            package = known_implementations[protocol]["class"].partition(".")[0]
            if package == "fsspec":
                return f"{protocol}:// cannot be used: {error}"
            return f"{protocol}:// needs the package {package}: {install(package)}"
    if not match[3].strip("/"):
        return "it has no folder; add one after the bucket"
    return None


def missing(path: Path) -> FileNotFoundError:
    """Return the error for a missing file."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def pointer_at(path: Path, content: bytes | memoryview | None = None) -> str | None:
    """Return the error for a file of which only the pointer of Git LFS is here; None for others.

    Args:
        content: its content or the start of it, if that has been read.
    """
    if content is None:
        if path.stat().st_size >= 1024:  # no pointer, by the specification
            return None
        with path.open("rb") as file:
            content = file.read(len(POINTER))
    if bytes(content[: len(POINTER)]) != POINTER:
        return None
    return f"{path}: {ONLY_POINTER}"


def dangling(path: Path | str) -> str | None:
    """Return the error for a link that leads nowhere; None for anything else."""
    if isinstance(path, RemotePath) or not os.path.islink(path) or os.path.exists(path):
        return None
    where = os.readlink(path)
    return f"{path}: it is a link to {where}, which does not exist; restore that, or remove it"


def refuse_pointer(path: Path, content: bytes | memoryview | None = None) -> None:
    """Raise ConfigError for a file of which only the pointer of Git LFS is here."""
    if message := pointer_at(path, content):
        raise ConfigError(message)


class RemotePath(PosixPath):
    """Path on an object store.

    Its first part is the protocol, `s3:`, or `file::` if no host or bucket follows.
    """

    def __str__(self) -> str:
        protocol, *rest = self.parts
        root = "/" if protocol.endswith("::") else ""
        return f"{protocol.rstrip(':')}://{root}{'/'.join(rest)}"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not on a disk")

    def expanduser(self) -> "Self":
        return self

    def resolve(self, strict: bool = False) -> "Self":
        return self

    # --- looking ---

    def exists(self, **_: Any) -> bool:
        return self._type() is not None

    def is_dir(self, **_: Any) -> bool:
        return self._type() == "directory"

    def is_file(self, **_: Any) -> bool:
        return self._type() == "file"

    def stat(self, **_: Any) -> os.stat_result:
        """Return only the size and whether it is a folder."""
        found = self._info()
        mode = stat.S_IFDIR if found["type"] == "directory" else stat.S_IFREG
        return os.stat_result((mode, 0, 0, 1, 0, 0, found["size"] or 0, 0, 0, 0))

    def iterdir(self) -> Generator["Self", None, None]:
        """Yield the files and folders in a folder; FileNotFoundError if it does not exist."""
        return (self / name for name in sorted(self._list()))

    def glob(self, pattern: str) -> Generator["Self", None, None]:  # type: ignore[override,unused-ignore]
        first, _slash, rest = pattern.partition("/")
        if not self.is_dir():
            return
        for path in self.iterdir():
            if fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest else (path,)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files in a folder by name; empty if it does not exist."""
        try:
            found = self._list()
        except FileNotFoundError:
            return {}
        return {name: info["size"] for name, info in found.items() if info["type"] == "file"}

    def rglob(self, pattern: str) -> Generator["Self", None, None]:  # type: ignore[override,unused-ignore]
        """Yield the files below the folder whose names match; no folders."""
        names = (name for name in self.tree() if fnmatchcase(name.rpartition("/")[2], pattern))
        return (self.joinpath(*name.split("/")) for name in names)

    def tree(self) -> dict[str, tuple[int, str]]:
        """Return size and version of each file below the folder, by its path relative to it.

        The version is a digest of all that the store says about it. A file has itself, as ".".
        """
        from fsspec.core import url_to_fs

        if self.is_file():
            return {".": _size_and_version(self._info())}
        found: dict[str, dict[str, Any]] = {}
        with suppress(FileNotFoundError):  # not every store has a bucket of that name
            found = self._call("find", detail=True)
        start = len(url_to_fs(str(self))[1])
        return {
            name[start:].strip("/"): _size_and_version(info) for name, info in sorted(found.items())
        }

    def relative_to(self, *other: Any, **_: Any) -> PurePosixPath:  # type: ignore[override,unused-ignore]
        return PurePosixPath(*self.parts).relative_to(*(PurePosixPath(*o.parts) for o in other))

    def _list(self) -> dict[str, dict[str, Any]]:
        self._call("invalidate_cache")
        found = self._call("ls", detail=True)
        return {info["name"].rstrip("/").rpartition("/")[2]: info for info in found}

    def _info(self) -> dict[str, Any]:
        self._call("invalidate_cache")
        found: dict[str, Any] = self._call("info")
        return found

    def _type(self) -> str | None:
        try:
            found: str = self._info()["type"]
        except FileNotFoundError:
            return None
        return found

    # --- reading ---

    def read_bytes(self) -> bytes:
        found: bytes = self._call("cat_file")
        return found

    def read_text(self, encoding: str | None = None, *_: Any, **__: Any) -> str:
        return self.read_bytes().decode(encoding or "utf-8")

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read the bytes of each range (begin, end), concurrently if the store supports it."""
        begins, ends = [list(side) for side in zip(*ranges, strict=True)]
        found: list[bytes] = self._call("cat_ranges", begins, ends, many=True)
        for got, (begin, end) in zip(found, ranges, strict=True):
            if len(got) != end - begin:
                raise StoreError(f"{self}: it has fewer than {end:,} bytes")
        return found

    def read_into(self, view: memoryview, begin: int) -> None:
        """Fill `view` with the bytes from `begin` on, by several concurrent requests."""
        parts = [(at, min(at + PART, len(view))) for at in range(0, len(view), PART)]
        for group in (parts[i : i + AT_ONCE] for i in range(0, len(parts), AT_ONCE)):
            found = self.read_ranges([(begin + low, begin + high) for low, high in group])
            for (low, high), data in zip(group, found, strict=True):
                view[low:high] = data

    def open(self, mode: str = "r", buffering: int = -1, *_: Any, **__: Any) -> Any:
        """Open a binary file: `rb`, with the size of its buffer, or `wb`."""
        if mode == "wb":
            return Upload(self)
        assert mode == "rb", mode
        raw = RangedFile(self)
        return raw if buffering == 0 else io.BufferedReader(raw, max(buffering, 2**20))

    # --- writing ---

    def write_bytes(self, data: Any) -> int:
        """Write atomically: a store has the whole file or nothing."""
        self._call("pipe_file", bytes(data))
        return len(data)

    def write_text(self, data: str, encoding: str | None = None, *_: Any, **__: Any) -> int:
        return self.write_bytes(data.encode(encoding or "utf-8"))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Create a folder if the store has folders; never a bucket."""
        try:
            self._call("mkdir", create_parents=False)
        except FileNotFoundError:
            least = 1 if self.parts[0].endswith("::") else 2
            if not parents or len(self.parts) - 1 <= least:
                raise
            self.parent.mkdir(mode, parents, exist_ok=True)
            self._call("mkdir", create_parents=False)
        except StoreError as error:
            if not exist_ok or not isinstance(error.__cause__, FileExistsError):
                raise

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._call("rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Delete the path and everything in it, if it exists."""
        self._call("invalidate_cache")
        with suppress(FileNotFoundError):
            self._call("rm", recursive=True)

    # --- the store ---

    def _call(self, method: str, *args: Any, **named: Any) -> Any:
        """Call a method of the filesystem with this path, with retries if the store fails."""
        for attempt in range(ATTEMPTS - 1):
            try:
                return self._call_once(method, *args, **named)
            except StoreError as error:
                if isinstance(error.__cause__, HOPELESS):
                    raise
                time.sleep(RETRY_SECONDS * 2**attempt)
        return self._call_once(method, *args, **named)

    def _call_once(self, method: str, *args: Any, many: bool = False, **named: Any) -> Any:
        """Call the method once; `many` reads the ranges given by all arguments."""
        from fsspec.core import url_to_fs

        try:
            filesystem, path = url_to_fs(str(self))
            if many:
                return filesystem.cat_ranges([path] * len(args[0]), *args, on_error="raise")
            return getattr(filesystem, method)(path, *args, **named)
        except FileNotFoundError:
            raise missing(self) from None
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> StoreError:
        why = problem_of_url(str(self)) or f"{type(error).__name__}: {error}"
        return StoreError(f"{self}: {why}")


def _size_and_version(info: dict[str, Any]) -> tuple[int, str]:
    return info["size"], hashlib.sha256(str(info).encode()).hexdigest()


class RangedFile(io.RawIOBase):
    """File of a store, of which only the requested bytes are read."""

    def __init__(self, path: RemotePath) -> None:
        self.path, self.at, self.size = path, 0, path.stat().st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.size - self.at)]
        self.path.read_into(view, self.at)
        self.at += len(view)
        return len(view)


class Upload(io.RawIOBase):
    """File being written to a store; it exists once it is closed."""

    def __init__(self, path: RemotePath) -> None:
        self.path, self.at = path, 0
        self._file: Any = None
        self._file = path._call_once("open", "wb")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def write(self, data: Any) -> int:
        count: int = self._do("write", memoryview(data).cast("B")[:PART])
        self.at += count
        return count

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._file is not None:
                self._do("close")

    def _do(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._file, method)(*args)
        except Exception as error:
            raise self.path._failed(error) from error
