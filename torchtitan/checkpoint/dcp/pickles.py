"""Reads pickles as data: nothing in them is imported, called or trusted.

A pickle names classes and functions, and calls them. Here each name has to be one of those that the
format uses, and stands for a class made on the spot, which keeps what it is given and does nothing
else; so whatever a file asks for, the result is tuples, dicts and objects without behaviour.
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
"""What `pickle` raises where the bytes make no sense."""


class Inert:
    """An object of a pickle: what it was made of, and the state that it was given."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "Inert":
        self = super().__new__(cls)
        self.args, self.state = args, {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class InertUnpickler(pickle.Unpickler):
    """Knows the names it is told, and dtypes; of each it makes an `Inert`, of sizes a tuple."""

    def __init__(
        self,
        data: bytes,
        where: object,
        names: Collection[str],
        storage: Callable[[Any], Any] | None = None,
    ) -> None:
        """`where` the pickle is; `names` as module.name; `storage`: a persistent id's meaning."""
        super().__init__(io.BytesIO(data))
        self.where, self.names, self.storage = where, names, storage
        # Made anew for each pickle: what one of them does to a class ends with it.
        self.kinds: dict[str, Any] = {"torch.Size": tuple}

    def find_class(self, module: str, name: str, /) -> Any:
        """What stands for a class or function; never the one that is named."""
        full = f"{module}.{name}"
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if full == "builtins.getattr":
            return self._member
        if full not in self.names:
            raise self._refusal(full)
        return self.kinds.setdefault(full, type(name, (Inert,), {}))

    def _member(self, kind: Any, name: Any) -> Inert:
        """Of an enum, as Python 3.11.0 to 3.11.3 pickles it: by its name, others by its value."""
        if not any(kind is known for known in self.kinds.values() if known is not tuple):
            raise self._refusal("builtins.getattr")
        member: Inert = kind(name)
        return member

    def _refusal(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: refused: it names {name}, which is no part of this format; a file "
            "that does so may run anything when it is read by others. Nothing of it was run"
        )

    def persistent_load(self, pid: Any, /) -> Any:
        """Tensors' storages, where there may be some."""
        if self.storage is None:
            raise pickle.UnpicklingError("persistent id")
        return self.storage(pid)

    def read(self) -> Any:
        """The content.

        Raises:
            ConfigError: where it names anything else.
            Damaged: where it is not a pickle.
        """
        try:
            return self.load()
        except ConfigError:
            raise
        except MALFORMED as error:
            raise Damaged(f"{self.where}: damaged: {error}") from None

    def is_a(self, value: Any, name: str) -> bool:
        """Whether a value is a record of the class module.name."""
        return name in self.kinds and isinstance(value, self.kinds[name])
