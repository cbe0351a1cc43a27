"""An object store of the tests' own, `store://`: it counts, and fails or waits where it is told to.

It has no folders and no rename, remembers listings until it is asked to forget them, as s3fs does,
and raises what is no `OSError`, as client libraries do.
"""

from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class ClientError(Exception):
    """What a client library raises."""


class ObjectStore(MemoryFileSystem):
    protocol = "store"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    requests: list[tuple[str, str, int]] = []  # noqa: RUF012
    """Method, path and bytes that were read of each."""
    listings: dict[str, Any] = {}  # noqa: RUF012
    before: Callable[[str, str], None] = staticmethod(lambda method, path: None)
    """Called with method and path; may wait or raise."""

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("store://"))

    @classmethod
    def reset(cls):
        cls.store.clear()
        cls.requests.clear()
        cls.listings.clear()
        cls.reset_failures()

    @classmethod
    def reset_failures(cls):
        cls.before = staticmethod(lambda method, path: None)

    @classmethod
    def break_down(cls, *methods, within="", times=float("inf")):
        """Have methods fail on paths that contain `within`."""
        left = times

        def fail(method, path):
            nonlocal left
            if method in methods and within in path and left > 0:
                left -= 1
                raise ClientError(f"503 Slow Down ({method})")

        cls.before = staticmethod(fail)

    @classmethod
    def bytes_read(cls):
        return sum(count for _, _, count in cls.requests)

    def _asked(self, method, path, count=0):
        type(self).before(method, path)
        self.requests.append((method, path, count))

    def mkdir(self, path, create_parents=True, **named):
        """Nothing: there are no folders."""

    def ls(self, path, detail=True, **named):
        path = self._strip_protocol(path)
        self._asked("ls", path)
        if path not in self.listings:
            self.listings[path] = super().ls(path, detail=True, **named)
        found = self.listings[path]
        return found if detail else [info["name"] for info in found]

    def invalidate_cache(self, path=None):
        self.listings.clear()

    def info(self, path, **named):
        path = self._strip_protocol(path)
        self._asked("info", path)
        for info in self.listings.get(self._parent(path), ()):
            if info["name"] == path:
                return info
        return super().info(path, **named)

    def cat_file(self, path, start=None, end=None, **named):
        path = self._strip_protocol(path)
        data = super().cat_file(path, start, end, **named)
        self._asked("cat_file", path, len(data))
        return data

    def pipe_file(self, path, value, **named):
        self._asked("pipe_file", self._strip_protocol(path))
        super().pipe_file(path, value, **named)

    def _open(self, path, mode="rb", **named):
        self._asked("open", self._strip_protocol(path))
        return super()._open(path, mode, **named)

    def _rm(self, path):
        self._asked("rm", self._strip_protocol(path))
        super()._rm(path)

    def rm_file(self, path):
        self._rm(path)


fsspec.register_implementation("store", ObjectStore)
