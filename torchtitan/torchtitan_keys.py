"""Every key of TorchTitan v0.1 and v0.2 that is not ours, with its translation.

`torchtitan migrate` translates a recipe by this table, which is in `torchtitan_keys.toml`; every
other verb refuses a recipe of TorchTitan.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import tomli

from torchtitan.config import ConfigError, KeyPath, RecipeError, Setting
from torchtitan.config.other_names import Gone, Moved, always, falsy, just

Settings = dict[KeyPath, Setting]
Rows = Mapping[str, Moved | Gone]

OUR_SECTIONS: Final = ("communication", "convert", "data", "loss", "sharding", "spikes")
"""Sections that no recipe of TorchTitan has."""
OF_CONVERTER: Final = "convert.*."
"""Start of a key of the `[[convert]]` section of a converter."""


def _opposite(value: Any) -> Any:
    return not value if isinstance(value, bool) else value


def _implementation(value: Any) -> Any:
    return {True: "fused", False: "foreach"}[value] if isinstance(value, bool) else value


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _rotation(value: Any) -> Any:
    return "ring" if value == "alltoall" else value


def _balancer(value: Any) -> Any:
    if value == "ptrr":
        raise ConfigError('it balances masks of FlexAttention; use "headtail"')
    return value


def _list(value: Any) -> Any:
    return value if isinstance(value, list) else [value] if value else []


def _states(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return ["data" if item == "dataloader" else item for item in value]


def names_in(value: Any) -> list[str]:
    """The names in a list, or in a text with commas."""
    parts = value if isinstance(value, list) else str(value).split(",") if value else []
    return [str(part).strip() for part in parts]


def _filters(value: Any) -> list[str]:
    if "auto_filter_small_kn" in (names := names_in(value)):
        raise ConfigError("linear layers are not filtered by size; list the names of all of them")
    return names


FORMS: Mapping[str, Callable[[Any], Any]] = {
    "balancer": _balancer,
    "filters": _filters,
    "implementation": _implementation,
    "list": _list,
    "number": _number,
    "opposite": _opposite,
    "recipe": lambda value: value or "tensorwise",
    "rotation": _rotation,
    "states": _states,
}
"""Values as they are written here, by the name of the form in the table."""


def _row(entry: Any) -> Moved | Gone:
    if isinstance(entry, str):
        return Moved(entry)
    if "to" in entry:
        return Moved(entry["to"], FORMS[entry["as"]])
    drop = entry.get("drop", "off")
    drops = just(*drop) if isinstance(drop, list) else {"any": always, "off": falsy}[drop]
    return Gone(entry["gone"], drops, entry.get("with"))


_FILE = tomli.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
UNTIL: Mapping[str, Rows] = {
    version: {name: _row(entry) for name, entry in rows.items()}
    for version, rows in _FILE["keys"].items()
}
"""Keys by the last version that had them."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = _FILE["defaults"]
"""Defaults that differ from ours, by version."""
TABLE: Rows = {name: row for rows in UNTIL.values() for name, row in rows.items()}
PRESENT_NAMES = {
    name: row.to.replace("*", "0") for name, row in TABLE.items() if isinstance(row, Moved)
}
"""Keys of this project by their names in TorchTitan, for suggestions."""
ADVICE = {name: row.instead for name, row in TABLE.items() if isinstance(row, Gone)}
"""Advice on keys of TorchTitan that have no counterpart."""


def foreign_keys(settings: Iterable[KeyPath]) -> list[KeyPath]:
    """The keys that only TorchTitan has."""
    rows = ((path, ".".join(path)) for path in settings)
    return [path for path, name in rows if name in TABLE and PRESENT_NAMES.get(name) != name]


def section_of_ours(settings: Iterable[KeyPath]) -> str | None:
    """A section that only this project has, if there is one."""
    return next((path[0] for path in settings if path[0] in OUR_SECTIONS), None)


def version_of(foreign: Iterable[KeyPath]) -> tuple[str, str]:
    """The newest version that has all these keys, and the key that shows it."""
    names = [".".join(key) for key in foreign]
    return next((until, n) for until, rows in UNTIL.items() for n in names if n in rows)


def refuse_foreign(sources: Iterable[Settings]) -> None:
    """Refuse a recipe of TorchTitan, with the command that converts it.

    It is one if it has several keys that only TorchTitan has, and no section that only this project
    has. A single one is rather a key that somebody remembers.

    Raises:
        RecipeError: with the command.
    """
    for settings in sources:
        foreign = foreign_keys(settings)
        if len(foreign) < 2 or section_of_ours(settings):
            continue
        version, _ = version_of(foreign)
        shown = ", ".join(".".join(key) for key in foreign[:3])
        path = Path(settings[foreign[0]].origin.rpartition(":")[0])
        new = path.with_name(f"{path.stem}_migrated.toml")
        command = shlex.join(["torchtitan", "migrate", str(path), "-o", str(new)])
        raise RecipeError([f"{path}: keys of TorchTitan {version}, such as {shown}; run {command}"])
