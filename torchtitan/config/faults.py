"""What is wrong with a setting taken by itself, and what could be written instead."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from torchtitan.config.schema import (
    classes,
    describe,
    field_schema,
    find_field,
    is_section,
    names,
    one_of,
    section_class,
    validate,
)
from torchtitan.config.settings import Config, ConfigError, KeyPath, OneOf, Setting
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
    choice = _choice(schema, path[:-1], settings)
    if choice and path[-1] == "name" and not choice.choice(value):
        raise ConfigError(f"got {show(value)}; {allowed_names(value, choice.registry)}")
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
    if is_section(info):
        if value != {}:
            raise ConfigError(f"got {show(value)}; wanted a section")
        return
    try:
        values[path] = validate(info, value)
    except ValidationError:
        raise ConfigError(f"got {show(value)}; {wanted(info, value)}") from None


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
    owners = [choice for section, choice, _ in homes if path[:-1] == (section,) and choice]
    if owners:
        return f"; {' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} {path[-1]}"
    elsewhere = list(dict.fromkeys(f"{section}.{path[-1]}" for section, _, _ in homes))
    near = nearest(path[-1], known, "".join(f"{part}." for part in path[:-1]))
    if len(elsewhere) == 1 or (elsewhere and not near):
        return f"; did you mean {' or '.join(elsewhere)}?"
    return near


def _choice(
    schema: type[Config], section: KeyPath, settings: Mapping[KeyPath, Setting]
) -> OneOf | None:
    info = find_field(schema, section, settings) if section else None
    return one_of(info) if info else None
