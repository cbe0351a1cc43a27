"""Registries: what a recipe can name, and the class that each name stands for."""

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from importlib.util import find_spec
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """Entries by the name that a recipe gives.

    An entry may be given as the place where it is defined, "package.module:name". It is imported
    when it is first used, so what no recipe asks for costs nothing. The entries of
    `torchtitan.research`, where that is installed, are such places.
    """

    def __init__(self, kind: str, entries: Mapping[str, T | str]) -> None:
        """Make the registry that `torchtitan.research` calls `kind`, with `entries`."""
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


def _research(kind: str) -> Mapping[str, str]:
    """The places of the entries of one kind in `torchtitan.research`, if it is there."""
    if find_spec("torchtitan.research") is None:
        return {}
    entries: Mapping[str, str] = import_module("torchtitan.research").entries(kind)
    return entries
