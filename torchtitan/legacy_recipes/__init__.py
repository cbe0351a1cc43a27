"""Recipes written for TorchTitan v0.1 and v0.2: what moved, and what has no counterpart.

One table maps every key of theirs that is not ours. A key that moved is read under its new name,
with a notice. A key without a counterpart is dropped, with a notice, where its value asks for
nothing (a feature that is off); otherwise it is refused, with what to write instead. `torchtitan
migrate` writes the same translation into a file.
"""

from typing import Any

from torchtitan.config import ConfigError, KeyPath, Setting, Translation, allowed_names, show
from torchtitan.legacy_recipes import converters
from torchtitan.legacy_recipes.rows import Converted, Gone, Kept, Moved
from torchtitan.legacy_recipes.table import TABLE

__all__ = ["TABLE", "Converted", "Gone", "Kept", "Moved", "entry", "new_name", "translate"]

Settings = dict[KeyPath, Setting]

OLD_SECTIONS = (
    "experimental",
    "float8",
    "memory_estimation",
    "mx",
    "quantize",
    "training.dataloader",
    "validation.dataloader",
)


def entry(path: KeyPath) -> Moved | Gone | Kept | Converted | None:
    """The row of the table for a key: its own, or that of the section it stands in."""
    dotted = ".".join(path)
    if dotted in TABLE:
        return TABLE[dotted]
    sections = (".".join(path[:depth]) for depth in range(len(path) - 1, 0, -1))
    return next((TABLE[f"{name}.*"] for name in sections if f"{name}.*" in TABLE), None)


def new_name(path: KeyPath) -> KeyPath:
    """The present path of an old key whose value is written as before; other paths as they are."""
    row = entry(path)
    return tuple(row.to.split(".")) if isinstance(row, Moved) and not row.convert else path


def translate(settings: Settings, below: Settings) -> Translation:
    """Read the settings of one source, whatever version it was written for.

    Args:
        below: what they go over, as it was written; for flags it is the recipe.
    """
    result = Translation({}, [], [], {})
    numbers, keys = converters.sections(settings, below, result)
    for path, setting in keys.items():
        _translate_key(path, setting, settings, numbers, result)
    if converters.NAMES in settings:
        converters.keep_filters(numbers, settings[converters.NAMES].origin, result)
    return result


def _translate_key(
    path: KeyPath,
    setting: Setting,
    settings: Settings,
    numbers: dict[str, int],
    result: Translation,
) -> None:
    row, dotted, value, section = entry(path), ".".join(path), setting.value, ".".join(path[:-1])
    got = f"{setting.origin}: {dotted}: got {show(value)}"
    left_out = f"{setting.origin}: {dotted}: {show(value)} is left out"
    is_old = f"{dotted}.".startswith(tuple(f"{name}." for name in OLD_SECTIONS))
    if is_old and value == {}:
        return  # the header of a section
    if section in converters.HERE and section not in numbers:
        result.notices.append(f"{left_out}; it only acts where model.converters names {section}")
    elif isinstance(row, Converted):
        _move(("convert", str(numbers[section]), row.to), row, path, setting, settings, result)
    elif isinstance(row, Moved):
        _move(tuple(row.to.split(".")), row, path, setting, settings, result)
    elif isinstance(row, Gone) and _asks_nothing(row, value, settings):
        result.notices.append(f"{left_out}; {row.instead}")
    elif isinstance(row, Gone):
        result.problems.append(f"{got}; {row.instead}")
    elif isinstance(row, Kept) and isinstance(value, str) and value in row.missing:
        result.problems.append(f"{got}; {row.missing[value]}")
    elif is_old:
        known = [name.split(".")[-1] for name in TABLE if name.rpartition(".")[0] == section]
        unknown = f"unknown key; {allowed_names(path[-1], known)}"
        result.problems.append(f"{setting.origin}: {dotted}: {unknown}")
    else:
        result.settings[path] = setting


def _asks_nothing(row: Gone, value: Any, settings: Settings) -> bool:
    switch = settings.get(tuple(row.acts_with.split("."))) if row.acts_with else None
    is_off = row.acts_with is not None and (switch is None or switch.value is False)
    return is_off or row.asks_nothing(value)


def _move(
    target: KeyPath,
    row: Moved | Converted,
    path: KeyPath,
    setting: Setting,
    settings: Settings,
    result: Translation,
) -> None:
    """Read a key under its new name, its value as it is written there."""
    where, value = f"{setting.origin}: {'.'.join(path)}", setting.value
    try:
        value = row.convert(value) if row.convert else value
    except ConfigError as error:
        result.problems.append(f"{where}: got {show(value)}; {error}")
        return
    if isinstance(row, Moved) and row.chosen_by and row.idle(value):
        chooser, choice = row.chosen_by
        chosen = settings.get(tuple(chooser.split(".")))
        if chosen and chosen.value != choice:
            because = f"it only acts with {chooser} = {show(choice)}"
            result.notices.append(f"{where}: {show(value)} is left out; {because}")
            return
    if target != path:
        result.notices.append(f"{where}: is now {'.'.join(target)}")
        if target in settings:
            both = f"{'.'.join(target)} of {settings[target].origin} says the same thing; keep that"
            result.problems.append(f"{where}: got {show(setting.value)}; {both}")
            return
    elif value != setting.value:
        result.notices.append(f"{where}: {show(setting.value)} is now {show(value)}")
    result.moved[path] = target
    result.settings[target] = Setting(value, setting.origin)
