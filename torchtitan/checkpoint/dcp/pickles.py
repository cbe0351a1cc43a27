"""Reads pickles as data: nothing in them is imported, called or trusted.

A pickle names classes and functions, and calls them. Here each name must be in the format's list,
and maps to a stub class, which keeps its arguments and does nothing else; so for any file, the
result is tuples, dicts and objects without behaviour.
"""

import io
import pickle
from collections.abc import Callable, Collection
from typing import Any

import torch

from torchtitan.checkpoint.manifest import Damaged
from torchtitan.config import ConfigError

MALFORMED = (
    *(pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError),
    *(OverflowError, MemoryError, RecursionError),
)
"""Errors that `pickle` raises for malformed bytes."""


class Inert:
    """Stub of a pickled object: its arguments and its state."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "Inert":
        self = super().__new__(cls)
        self.args, self.state = args, {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class InertUnpickler(pickle.Unpickler):
    """Unpickler that knows the given names and dtypes, and creates `Inert` stubs and tuples."""

    def __init__(
        self,
        data: bytes,
        where: object,
        names: Collection[str],
        storage: Callable[[Any], Any] | None = None,
    ) -> None:
        """Open a pickle at `where`; `names` are module.name; `storage` maps persistent ids."""
        super().__init__(io.BytesIO(data))
        self.where, self.names, self.storage = where, names, storage
        # Created for each pickle, so that none affects the classes of another.
        self.kinds: dict[str, Any] = {"torch.Size": tuple}

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the stub of a class or function; the real one is never imported."""
        full = f"{module}.{name}"
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if full == "builtins.getattr":
            return self._member
        if full not in self.names:
            raise self._refusal(full)
        return self.kinds.setdefault(full, type(name, (Inert,), {}))

    def _member(self, kind: Any, name: Any) -> Inert:
        """Return an enum member, which Python 3.11.0 to 3.11.3 pickles by name, others by value."""
        if not any(kind is known for known in self.kinds.values() if known is not tuple):
            raise self._refusal("builtins.getattr")
        member: Inert = kind(name)
        return member

    def _refusal(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: refused: it names {name}, which is not part of this format; other "
            "programs that read such a file may execute arbitrary code. Nothing was executed"
        )

    def persistent_load(self, pid: Any, /) -> Any:
        """Return a tensor's storage, if the pickle may have any."""
        if self.storage is None:
            raise pickle.UnpicklingError("persistent id")
        return self.storage(pid)

    def read(self) -> Any:
        """Return the content.

        Raises:
            ConfigError: if it names anything unknown.
            Damaged: if it is not a pickle.
        """
        try:
            return self.load()
        except ConfigError:
            raise
        except MALFORMED as error:
            raise Damaged(f"{self.where}: damaged: {error}") from None

    def is_a(self, value: Any, name: str) -> bool:
        """Whether a value is a stub of the class module.name."""
        return name in self.kinds and isinstance(value, self.kinds[name])
