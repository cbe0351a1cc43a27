"""Registries of the names in recipes and their classes, and what wings add to them.

`ENTRIES` in the `__init__.py` of a wing has what it adds: by the kind of registry and the name in
it, the place where it is defined, relative to the wing.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache, cached_property
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from torchtitan.config.settings import ConfigError

PACKAGE: Final = Path(__file__).parents[1]
WINGS: Final = ("plan", "cluster", "research")


def has_wing(name: str) -> bool:
    """Whether a wing is installed."""
    return any((PACKAGE / name).glob("*.py"))


def needs_wing(name: str) -> str:
    """Return the message for a key or a verb of a wing that is not installed."""
    return f"it needs torchtitan.{name}, which is not installed"


def absent_wings() -> str:
    """Name the wings that are not installed; empty if all are."""
    absent = [f"torchtitan.{name}" for name in WINGS if not has_wing(name)]
    return f"not installed: {', '.join(absent)}" if absent else ""


T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """Entries by their name in recipes, those of the wings included.

    An entry may be given as the place where it is defined, "package.module:name", which is imported
    on first use, so that unused entries cost nothing. The entries of wings are such places.
    """

    def __init__(self, kind: str, entries: Mapping[str, T | str] | None = None) -> None:
        """Make the registry that wings call `kind`, with the `entries` of the core."""
        self.kind, self._own = kind, entries or {}

    @cached_property
    def _entries(self) -> dict[str, T | str]:
        # At first use and not at import, so that a mistake in a wing can be reported.
        return with_wings(self.kind, self._own)

    def __getitem__(self, name: str) -> T:
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = self._entries[name] = load_entry(entry)
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


def load_entry(place: str) -> Any:
    """Import what is defined at a place, "package.module:name".

    Raises:
        ConfigError: if a file of torchtitan, or the name in it, is missing.
    """
    name, _, attribute = place.partition(":")
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("torchtitan."):
            raise
        raise ConfigError(f"{name}: it needs {error.name}, which is missing") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{name}: it has no {attribute}")
    return getattr(module, attribute)


def import_wing(module: str, user: str) -> Any:
    """Import a module of a wing for another wing.

    Args:
        user: key or option that needs it.

    Raises:
        ConfigError: if that wing is not installed.
    """
    wing = module.split(".")[1]
    if not has_wing(wing):
        raise ConfigError(f"{user}: {needs_wing(wing)}")
    return import_module(module)


def with_wings(kind: str, own: Mapping[str, T | str]) -> dict[str, T | str]:
    """Return the entries of the core and those that wings add to this kind of registry.

    Raises:
        ConfigError: if a wing lacks a file, or two of them have an entry of the same name.
    """
    added = wing_entries().get(kind, {})
    for name in own.keys() & added.keys():
        raise ConfigError(f"{added[name]}: {name} of {kind} is registered by the core too")
    return {**own, **added}


@cache
def wing_entries() -> Mapping[str, Mapping[str, str]]:
    """Return the places of all that the installed wings add, by the kind of registry and name.

    Raises:
        ConfigError: if a wing lacks a file, or two wings register the same name.
    """
    found: dict[str, dict[str, str]] = {}
    for wing in filter(has_wing, WINGS):
        for kind, name, place in _places(wing):
            if first := found.setdefault(kind, {}).get(name):
                raise ConfigError(
                    f"torchtitan/{wing}/__init__.py: {name} of {kind} is registered by {first} too"
                )
            found[kind][name] = place
    return found


def _places(wing: str) -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the name and the place of each entry of a wing."""
    own, remedy = f"torchtitan/{wing}/__init__.py", f"reinstall torchtitan/{wing}, or remove it"
    if not (PACKAGE.parent / own).is_file():
        raise ConfigError(f"{own} is missing; {remedy}")
    for kind, added in load_entry(f"torchtitan.{wing}:ENTRIES").items():
        for name, entry in added.items():
            place = f"torchtitan.{wing}.{entry}"
            path = PACKAGE.parent.joinpath(*place.partition(":")[0].split("."))
            if not (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()):
                missing = path.with_suffix(".py").relative_to(PACKAGE.parent)
                raise ConfigError(
                    f"{own}: {name} of {kind} needs {missing}, which is missing; {remedy}"
                )
            yield kind, name, place


def check_protocol(value: object, protocol: type, what: str) -> None:
    """Refuse what an entry of a registry returned if it lacks parts of its protocol.

    Raises:
        ConfigError: with their names.
    """
    wanted = {*protocol.__annotations__}
    wanted |= {name for name, part in vars(protocol).items() if isfunction(part)}
    wanted -= {"__init__", "__subclasshook__"}  # every protocol has the first two
    if missing := sorted(name for name in wanted if not hasattr(value, name)):
        raise ConfigError(
            f"{what}: {type(value).__name__} has no {' and no '.join(missing)}; add what "
            f"{protocol.__module__}.{protocol.__name__} has"
        )
