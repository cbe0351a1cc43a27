"""What is wrong with a setting taken by itself, and what could be written instead."""

from collections.abc import Mapping
from itertools import count, takewhile
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from torchtitan.config.schema import (
    classes,
    describe,
    field_schema,
    find_choice,
    find_list,
    is_section,
    list_of,
    names,
    section_class,
    validate,
)
from torchtitan.config.settings import Config, ConfigError, KeyPath, ListOf, Setting
from torchtitan.config.words import allowed_names, nearest, show


def validate_all(
    schema: type[Config], settings: Mapping[KeyPath, Setting]
) -> tuple[dict[KeyPath, Any], dict[KeyPath, str]]:
    """The values of the settings that are right, and what is wrong with the others."""
    values: dict[KeyPath, Any] = {}
    faults: dict[KeyPath, str] = {}
    for path in sorted(settings, key=len):  # a section before what is in it
        if any(path[:depth] in faults for depth in range(1, len(path))):
            continue
        try:
            _validate_into(values, schema, path, settings)
        except ConfigError as error:
            faults[path] = str(error)
    return values, {path: faults[path] for path in settings if path in faults}


def _validate_into(
    values: dict[KeyPath, Any],
    schema: type[Config],
    path: KeyPath,
    settings: Mapping[KeyPath, Setting],
) -> None:
    value = settings[path].value
    choice = find_choice(schema, path[:-1], settings)
    if choice and path[-1] == "name" and not choice.choice(value):
        raise ConfigError(f"got {show(value)}; {allowed_names(value, choice.registry)}")
    if several := find_list(schema, path[:-1], settings):
        _check_item(several, path, settings)
        return
    section = section_class(schema, path[:-1], settings)
    if section is None:
        return  # its name is wrong, so nobody knows what belongs into it
    info = section.model_fields.get(path[-1])
    if info is None:
        known = list(section.model_fields)
        what = "section" if len(path) == 1 and value == {} else "key"
        if choice:
            name = settings.get((*path[:-1], "name"))
            what += f" of {name.value if name else choice.default}"
        raise ConfigError(
            f"unknown {what}; allowed: {', '.join(known)}{_hint(schema, path, known)}"
        )
    if list_of(info):
        if not isinstance(value, list) or any(item != {} for item in value):
            raise ConfigError(f"got {show(value)}; wanted sections, each under [[{path[-1]}]]")
        return
    if is_section(info):
        if value != {}:
            raise ConfigError(f"got {show(value)}; wanted a section")
        return
    try:
        values[path] = validate(info, value)
    except ValidationError:
        raise ConfigError(f"got {show(value)}; {wanted(info, value)}") from None


def _check_item(several: ListOf, path: KeyPath, settings: Mapping[KeyPath, Setting]) -> None:
    """Refuse what is no section of a list, or has no name, or stands after a gap."""
    section, value = path[:-1], settings[path].value
    numbers = list(takewhile(lambda n: (*section, n) in settings, map(str, count())))
    if path[-1] not in numbers:
        allowed = [".".join((*section, n)) for n in (*numbers, str(len(numbers)))][-2:]
        raise ConfigError(f"they are numbered from 0 without a gap; wanted {' or '.join(allowed)}")
    if value != {}:
        raise ConfigError(f"got {show(value)}; wanted a section")
    if (*path, "name") not in settings:
        raise ConfigError(f"it has no name; allowed: {', '.join(several.registry)}")


def wanted(info: FieldInfo, value: Any) -> str:
    """What a field allows instead of `value`."""
    allowed = field_schema(info)
    known = names(allowed)
    if isinstance(value, list):
        value = next((item for item in value if item not in known), None)
    word = "allowed:" if {"enum", "const"} & allowed.keys() else "wanted"
    return f"{word} {describe(allowed)}{nearest(value, known)}"


def _hint(schema: type[Config], path: KeyPath, known: list[str]) -> str:
    """Where the key is known, or else the nearest name among `known`, those beside it."""
    homes = [home for home in classes(schema) if path[-1] in home[2].model_fields]
    here = ".".join("0" if part.isdecimal() else part for part in path[:-1])
    owners = [choice for section, choice, _ in homes if section == here and choice]
    if owners:
        return f"; {' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} {path[-1]}"
    elsewhere = list(dict.fromkeys(f"{section}.{path[-1]}" for section, _, _ in homes))
    near = nearest(path[-1], known, "".join(f"{part}." for part in path[:-1]))
    if len(elsewhere) == 1 or (elsewhere and not near):
        return f"; did you mean {' or '.join(elsewhere)}?"
    return near
