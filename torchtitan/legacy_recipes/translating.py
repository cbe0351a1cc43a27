"""Translates the settings of one source, key by key, by the rows of the table."""

from typing import Any

from torchtitan.config import ConfigError, KeyPath, Setting, allowed_names, located, show
from torchtitan.legacy_recipes import converters
from torchtitan.legacy_recipes.table import TABLE
from torchtitan.legacy_recipes.translations import (
    Converted,
    Gone,
    Kept,
    Moved,
    Together,
    Translation,
)

Settings = dict[KeyPath, Setting]

OLD_SECTIONS = tuple(
    f"{name}."
    for name in (
        *("experimental", "float8", "memory_estimation", "mx", "quantize"),
        *("training.dataloader", "validation.dataloader"),
    )
)


def entry(path: KeyPath) -> Moved | Gone | Kept | Converted | Together | None:
    """The row of the table for a key."""
    return TABLE.get(".".join(path))


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
        _translate_key(path, setting, settings, below, numbers, result)
    if converters.NAMES in settings:
        converters.keep_filters(numbers, settings[converters.NAMES].origin, result)
    return result


def _translate_key(
    path: KeyPath,
    setting: Setting,
    settings: Settings,
    below: Settings,
    numbers: dict[str, int],
    result: Translation,
) -> None:
    row, dotted, value, converter = entry(path), ".".join(path), setting.value, converters.of(path)
    got = f"{located(setting.origin, dotted)}: got {show(value)}"
    left_out = f"{located(setting.origin, dotted)}: {show(value)} is dropped"
    if row is None and f"{dotted}.".startswith(OLD_SECTIONS):
        if unknown := _unknown(path, is_section=value == {}):
            result.problems.append(f"{located(setting.origin, dotted)}: {unknown}")
    elif row and converter and converter not in numbers:
        because = f"it only has an effect if model.converters names {'.'.join(path[:-1])}"
        result.notices.append(f"{left_out}; {because}")
    elif isinstance(row, Converted):
        number = str(numbers[converter or ""])
        _move(("convert", number, row.to), row, path, setting, settings, result)
    elif isinstance(row, Moved):
        _move(tuple(row.to.split(".")), row, path, setting, settings, result)
    elif isinstance(row, Gone) and _asks_nothing(row, value, below | settings):
        result.notices.append(f"{left_out}; {row.instead}")
    elif isinstance(row, Gone):
        result.problems.append(f"{got}; {row.instead}")
    elif isinstance(row, Kept) and isinstance(value, str) and value in row.missing:
        result.problems.append(f"{got}; {row.missing[value]}")
    elif not isinstance(row, Together):
        result.settings[path] = setting


def _unknown(path: KeyPath, *, is_section: bool) -> str | None:
    """Describe the mistake in the name of a key or section among TorchTitan's own sections.

    Returns None if there is none, or if it is that of the enclosing section.
    """
    for depth in range(1, len(path) + 1):
        above = "".join(f"{key}." for key in path[: depth - 1])
        below = [name.removeprefix(above) for name in TABLE if name.startswith(above)]
        known = dict.fromkeys(name.split(".")[0] for name in below)
        if path[depth - 1] not in known:
            what = "section" if is_section else "key"
            at_end = depth == len(path)
            return f"unknown {what}; {allowed_names(path[-1], known)}" if at_end else None
    return None if is_section else "wanted a section"


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
    where, value = located(setting.origin, ".".join(path)), setting.value
    try:
        value = row.convert(value) if row.convert else value
    except ConfigError as error:
        result.problems.append(f"{where}: got {show(value)}; {error}")
        return
    if isinstance(row, Moved) and row.chosen_by and row.idle(value):
        chooser, choice = row.chosen_by
        chosen = settings.get(tuple(chooser.split(".")))
        if chosen and chosen.value != choice:
            because = f"it only has an effect with {chooser} = {show(choice)}"
            result.notices.append(f"{where}: {show(value)} is dropped; {because}")
            return
    if target != path:
        result.notices.append(f"{where}: is now {'.'.join(target)}")
        if same := settings.get(target, result.settings.get(target)):
            both = f"{'.'.join(target)} of {same.origin} sets the same thing; keep that"
            result.problems.append(f"{where}: got {show(setting.value)}; {both}")
            return
    elif value != setting.value:
        result.notices.append(f"{where}: {show(setting.value)} is now {show(value)}")
    result.moved[path] = target
    result.settings[target] = Setting(value, setting.origin)
