"""Registries of the names in recipes and their classes."""

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from importlib.util import find_spec
from inspect import isfunction
from typing import Generic, TypeVar

from torchtitan.config.settings import ConfigError

T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """Entries by their name in recipes.

    An entry may be given as the place where it is defined, "package.module:name", which is imported
    on first use, so that unused entries cost nothing. The entries of `torchtitan.research`, where
    that is installed, are such places.
    """

    def __init__(self, kind: str, entries: Mapping[str, T | str]) -> None:
        """Make the registry called `kind` in `torchtitan.research`, with `entries`."""
        self._entries: dict[str, T | str] = {**entries, **_research(kind)}

    def __getitem__(self, name: str) -> T:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self._entries[name] = getattr(import_module(module), attribute)
        return entry

    def __setitem__(self, name: str, entry: T) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def check_protocol(value: object, protocol: type, what: str, optional: str = "") -> None:
    """Refuse what an entry of a registry returned if it lacks parts of its protocol.

    Args:
        optional: part that it may lack.

    Raises:
        ConfigError: with their names.
    """
    wanted = {*protocol.__annotations__}
    wanted |= {name for name, part in vars(protocol).items() if isfunction(part)}
    wanted -= {"__init__", "__subclasshook__", optional}  # every protocol has the first two
    if missing := sorted(name for name in wanted if not hasattr(value, name)):
        raise ConfigError(
            f"{what}: {type(value).__name__} has no {' and no '.join(missing)}; add what "
            f"{protocol.__module__}.{protocol.__name__} has"
        )


def _research(kind: str) -> Mapping[str, str]:
    """Return the entries of one kind in `torchtitan.research`, if it is installed."""
    if find_spec("torchtitan.research") is None:
        return {}
    entries: Mapping[str, str] = import_module("torchtitan.research").entries(kind)
    return entries
