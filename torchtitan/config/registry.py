"""Registries of the names in recipes and their classes, and what wings add to them.

`ENTRIES` in the `__init__.py` of a wing has what it adds: by the kind of registry and the name in
it, the place where it is defined, relative to the wing. `ABSENT`, if it has that, lists its modules
that are not installed, whose names are then unknown to recipes.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import cache, cached_property
from importlib import import_module
from inspect import isfunction, signature
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar, get_args, get_origin

from torchtitan.config.settings import ConfigError
from torchtitan.config.words import shorten

PACKAGE: Final = Path(__file__).parents[1]
WINGS: Final = ("plan", "cluster", "research")


def has_wing(name: str) -> bool:
    """Whether a wing is installed."""
    return any((PACKAGE / name).glob("*.py"))


def needs_wing(name: str) -> str:
    """Return the message for a key or a verb of a wing that is not installed."""
    return f"it needs torchtitan.{name}, which is not installed"


def absent_wings() -> str:
    """Name the wings, and the parts of wings, that are not installed; empty if all are."""
    absent = [f"torchtitan.{name}" for name in WINGS if not has_wing(name)]
    for name in filter(has_wing, WINGS):
        absent += getattr(import_module(f"torchtitan.{name}"), "ABSENT", ())
    return f"not installed: {', '.join(absent)}" if absent else ""


T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """Entries by their name in recipes, those of the wings included.

    An entry may be given as the place where it is defined, "package.module:name", which is imported
    on first use, so that unused entries cost nothing. The entries of wings are such places. An
    entry that lacks something of the type `T` is refused when it is added, or imported.
    """

    __orig_class__: Any
    """This class with its `T`, which Python sets on each registry."""

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
            place, entry = entry, load_entry(entry)
            self._check(entry, f"{place}: {name} of {self.kind}")
            self._entries[name] = entry
        return entry

    def __setitem__(self, name: str, entry: T) -> None:
        if name in self._entries:
            raise ConfigError(f"{name} of {self.kind} is registered already; use another name")
        self._check(entry, f"{name} of {self.kind}")
        self._entries[name] = entry

    def _check(self, entry: object, what: str) -> None:
        if lacking := lacks(entry, *get_args(self.__orig_class__)):
            raise ConfigError(f"{what} {lacking}")

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
    except TypeError as error:  # such as an argument of a spec that is missing
        raise ConfigError(f"{_line_of(error)}: {error}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{name}: it has no {attribute}")
    return getattr(module, attribute)


def import_extension(name: str) -> None:
    """Import a module from outside the package, which may add to registries.

    Raises:
        ConfigError: if it cannot be imported, with the line of it that is at fault.
    """
    try:
        import_module(name)
    except ImportError as error:
        raise ConfigError(f"it cannot be imported: {shorten(str(error))}") from error
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{_line_of(error)}: {error}") from error


def import_modules(names: Iterable[str], where: str) -> None:
    """Import modules from outside the package, which are named in `where`."""
    for name in names:
        try:
            import_extension(name)
        except ConfigError as error:
            raise ConfigError(f"{where}: got {name}; {error}") from None


def _line_of(error: Exception) -> str:
    """Return the last line of a module's own code, not of a function, that led to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if frame.name == "<module>"] or frames)[-1]
    return f"{last.filename}:{last.lineno}"


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


def lacks(entry: Any, wanted: Any) -> str:
    """Return what an entry of a registry lacks of the wanted type; empty if nothing.

    Args:
        wanted: a class or a protocol that it is an instance of; `type` of one that it extends; or a
            `Callable`, whose arguments it takes.
    """
    kind, arguments = get_origin(wanted) or wanted, get_args(wanted)
    if kind is Callable:
        try:
            takes = signature(entry)
            _ = arguments[0] is ... or takes.bind(*arguments[0])
        except TypeError as error:
            return f"cannot be called: {error}"
        return ""
    base, classes = kind, type(entry).__mro__
    if kind is type:
        base, classes = arguments[0], getattr(entry, "__mro__", ())
    name, is_protocol = f"{base.__module__}.{base.__name__}", Protocol in base.__bases__
    if not is_protocol and base not in classes:
        return f"is no {'subclass of ' if kind is type else ''}{name}"
    parts = {
        part
        for parent in base.__mro__
        for part, value in vars(parent).items()
        if _is_abstract(value) or (is_protocol and isfunction(value))
    }
    for part, declared in base.__annotations__.items():
        if is_protocol or get_origin(declared) is ClassVar:
            parts.add(part)
    parts -= {"__init__", "__subclasshook__"}  # every protocol has them
    missing = sorted(p for p in parts if not hasattr(entry, p) or _is_abstract(getattr(entry, p)))
    return f"has no {' and no '.join(missing)}; add what {name} has" if missing else ""


def _is_abstract(value: object) -> bool:
    return getattr(value, "__isabstractmethod__", False)
