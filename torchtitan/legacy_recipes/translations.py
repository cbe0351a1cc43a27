"""The rows of the tables: every way to translate an old key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan.config import KeyPath, Setting


@dataclass(frozen=True)
class Moved:
    """A key with another name here; `convert` gives its value as it is written here."""

    to: str
    convert: Callable[[Any], Any] | None = None
    chosen_by: tuple[str, Any] | None = None
    """An old key, and the value of it that what this key sets belongs to."""
    idle: Callable[[Any], bool] = lambda _: False
    """Predicate of the values that may be left out next to another choice."""


@dataclass(frozen=True)
class Gone:
    """A key without a counterpart; `asks_nothing` accepts values that can be dropped."""

    instead: str
    asks_nothing: Callable[[Any], bool]
    acts_with: str | None = None
    """The switch that is on where the key asks for anything, if there is one."""


@dataclass(frozen=True)
class Kept:
    """A key of ours, some of whose old values are not there, with what to write instead."""

    missing: Mapping[Any, str]


@dataclass(frozen=True)
class Converted:
    """A key of a converter's own section, which belongs to its `[[convert]]` section here."""

    to: str
    convert: Callable[[Any], Any] | None = None


def always(value: Any) -> bool:
    """Whatever its value, dropping the key changes nothing."""
    return True


def falsy(value: Any) -> bool:
    """Off, empty or zero."""
    return not value or value == "none"


def just(*values: Any) -> Callable[[Any], bool]:
    """One of these values."""
    return lambda value: value in values


@dataclass(frozen=True)
class Together:
    """A key that has a meaning only together with others, which `unsaid` reads."""

    about: str


class Translation(NamedTuple):
    """The settings of one source, translated by a table."""

    settings: dict[KeyPath, Setting]
    notices: list[str]
    problems: list[str]
    moved: dict[KeyPath, KeyPath]
    """New paths of the settings that were moved."""
