"""Validation of each setting by itself, with the allowed values in the errors."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import count, takewhile
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from torchtitan.config.schema import (
    Kind,
    Several,
    class_at,
    describe,
    field_schema,
    find,
    kind_of,
    names,
    places,
)
from torchtitan.config.settings import BAD_CHOICE, Config, Discriminated, KeyPath, OneOf, Setting
from torchtitan.config.words import (
    MAX_NESTED,
    SECTION_AND_KEY,
    did_you_mean,
    holds_sections,
    listed,
    near_names,
    nearest,
    told,
)

ConfigT = TypeVar("ConfigT", bound=Config)
Settings = Mapping[KeyPath, Setting]


def validate_all(
    schema: type[ConfigT], settings: Settings
) -> tuple[ConfigT, dict[KeyPath, str], Settings]:
    """Return the tree of settings, the faults by path, and the settings without faults.

    In the tree, defaults replace the faulty settings.
    """
    faults = {**dict(_gaps(schema, settings)), **dict(_unwritable(settings))}
    # If a name is invalid, nothing is known of its section either.
    homes = [path[:-1] for path in faults if path[-1] == "name"]
    dropped = {
        *faults,
        *(home for home in homes if isinstance(find(schema, home, settings), OneOf)),
    }
    while True:
        sound = {
            path: setting
            for path, setting in settings.items()
            if not any(path[:depth] in dropped for depth in range(1, len(path) + 1))
        }
        try:
            # In JSON, unlike in Python, a list is a strict tuple. A date has no JSON form; as an
            # object it fits no field.
            text = json.dumps(_nest(sound), default=lambda date: {"date": str(date)})
            config = schema.model_validate_json(text, strict=True)
        except ValidationError as error:
            for details in error.errors(include_url=False):
                path = tuple(map(str, details["loc"]))
                dropped.add(_whole(path, details["type"], sound))
                if path not in faults:
                    # Part of a value, or missing in a section, or of a value that is a list
                    # elsewhere.
                    while path and (path not in settings or _is_in_list(path, settings)):
                        path = path[:-1]
                    if path and path not in faults:
                        faults[path] = _message(schema, path, details, settings)
                        faults |= _inside_misnamed(schema, path, details["type"], settings)
        else:
            return config, {path: faults[path] for path in settings if path in faults}, sound


def _inside_misnamed(
    schema: type[Config], path: KeyPath, what: str, settings: Settings
) -> dict[KeyPath, str]:
    """Return the faults within a section whose name, or choice by name, is misspelt.

    The section is read as if it had the nearest name; without one, a section with a wrong choice is
    read as its default, except for keys that differ in another choice.
    """
    value, above, known = settings[path].value, path[:-1], list[str]()
    parent, choice = find(schema, above, settings), None
    if what == BAD_CHOICE and isinstance(parent, OneOf) and path[-1] == "name":
        near = near_names(value, parent.registry)
        choice, section, other = next(iter([*near, parent.default])), above, above
        if not near and choice:
            own = parent.widest(choice).model_fields
            for other_choice in map(parent.widest, parent.registry):
                for key, info in other_choice.model_fields.items():
                    if key not in own or info.annotation != own[key].annotation:
                        known.append(key)
    elif what == "extra_forbidden" and value == {}:
        owner = class_at(parent, above, settings)
        section, near = path, near_names(path[-1], owner.model_fields if owner else ())
        other = (*above, *near)
    else:
        return {}
    if (choice is None and not near) or any(part.isdecimal() for part in section[:-1]):
        return {}
    moved = {}
    if section[-1].isdecimal():
        other = (*section[:-1], "0")
        moved[section[:-1]] = Setting([{}], "")
    for inner, setting in settings.items():
        if inner[: len(section)] == section:
            moved[*other, *inner[len(section) :]] = setting
    if choice:
        moved[*other, "name"] = Setting(choice, "")
    _, found, _ = validate_all(schema, moved)
    return {
        (*section, *inner[len(other) :]): message
        for inner, message in found.items()
        if inner[: len(other)] == other and inner != other and inner[-1] not in known
    }


def _is_in_list(path: KeyPath, settings: Settings) -> bool:
    above = settings[path[:-1]].value if path[:-1] in settings else None
    return isinstance(above, list) and bool(above) and not holds_sections(above)


def _whole(path: KeyPath, what: str, settings: Settings) -> KeyPath:
    """Return the path to drop after an error: the section, if it needs the missing key."""
    if what == "missing" or (what == BAD_CHOICE and path[-1] == "name"):
        path = path[:-1]
    assert path, "the whole recipe needs nothing"
    whole = path
    while whole and whole not in settings:
        whole = whole[:-1]
    return whole or path  # that of a section of which only keys are there


def _gaps(schema: type[Config], settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Find sections of a list with gaps before their numbers."""
    for *above, last in settings:
        path = tuple(above)
        if not last.isdecimal() or not isinstance(find(schema, path, settings), Several):
            continue
        numbers = list(takewhile(lambda n: (*path, n) in settings, map(str, count())))  # noqa: B023
        if last not in numbers:
            allowed = [".".join((*path, n)) for n in (*numbers, str(len(numbers)))][-2:]
            wanted = f"wanted {' or '.join(allowed)}"
            yield (*path, last), f"they are numbered from 0 without a gap; {wanted}"


def _unwritable(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Find values that TOML, files or terminals cannot represent."""
    for path, setting in settings.items():
        if len(path) > MAX_NESTED:
            yield path, f"it is nested too deeply; wanted {SECTION_AND_KEY}"
        elif why := _why_unwritable([*path, setting.value]):
            yield path, f"{told(setting.value)}{why}"


def _why_unwritable(value: Any) -> str:
    if isinstance(value, list):
        return next(filter(None, map(_why_unwritable, value)), "")
    if isinstance(value, dict):
        return _why_unwritable([*value.keys(), *value.values()])
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        return "wanted UTF-8 text without the character U+0000"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "wanted an integer of 64 bits, below 9,223,372,036,854,775,808"
    return ""


def _nest(settings: Settings) -> Any:
    """Return the settings nested as in TOML."""
    tree: dict[str, Any] = {}
    node: Any
    for path in sorted(settings, key=len):  # a section before its contents
        value, node = settings[path].value, tree
        for key in path[:-1]:
            node = node.setdefault(key, {}) if isinstance(node, dict) else {}
        if not isinstance(node, dict):
            continue  # a section whose place has a value from another source, which is an error
        if value == {}:
            node.setdefault(path[-1], {})
        elif not holds_sections(value):
            node[path[-1]] = value
    return _make_lists(tree)


def _make_lists(node: Any) -> Any:
    """Replace mappings with number keys by lists, up to the first missing number."""
    if not isinstance(node, dict):
        return node
    if node and all(key.isdecimal() for key in node):
        return [_make_lists(node[n]) for n in takewhile(node.__contains__, map(str, count()))]
    return {key: _make_lists(value) for key, value in node.items()}


def _message(schema: type[Config], path: KeyPath, details: ErrorDetails, settings: Settings) -> str:
    value, kind = settings[path].value, find(schema, path, settings)
    got, what = told(value), details["type"]
    if what == BAD_CHOICE:
        above = path[:-1]
        return details["msg"] + did_you_mean(_keys_for(find(schema, above, settings), above, value))
    if what == "extra_forbidden":
        return _unknown(schema, path, settings)
    if what == "missing":
        return f"it has no {details['loc'][-1]}"
    if isinstance(kind, Several):
        header = ".".join(key for key in path if not key.isdecimal())
        return f"{got}wanted sections, each under [[{header}]]"
    if not isinstance(kind, FieldInfo):
        likely = _keys_for(kind, path, value)
        if isinstance(kind, OneOf) and isinstance(value, str):
            likely = likely or [".".join((*path, "name"))]
        return f"{got}wanted a section{did_you_mean(likely)}"
    if what == "value_error":
        return got + details["msg"].removeprefix("Value error, ")
    return got + wanted(kind, value)


def wanted(info: FieldInfo, value: Any) -> str:
    """Return the values that a field allows instead of `value`."""
    allowed = field_schema(info)
    known = names(allowed)
    if isinstance(value, list):
        value = next((item for item in value if item not in known), None)
    word = "allowed:" if {"enum", "const"} & allowed.keys() else "wanted"
    described = describe(allowed)
    if isinstance(value, float) and not math.isfinite(value):
        described = described.replace("a number", "a finite number")
    return f"{word} {described}{nearest(value, known)}"


def _unknown(schema: type[Config], path: KeyPath, settings: Settings) -> str:
    above = path[:-1]
    parent = find(schema, above, settings)
    section = class_at(parent, above, settings)
    assert section is not None, "only a section has unknown keys"
    what = "section" if not above and settings[path].value == {} else "key"
    if isinstance(parent, OneOf):
        name = settings.get((*above, "name"))
        chosen = str(name.value if name else parent.default)
        what, section = f"{what} of {chosen}", parent.widest(chosen)
    if isinstance(parent, Discriminated) and section is parent.base:
        section = parent.widest
    where = ".".join(key for key in above if not key.isdecimal())
    command = f"{schema.help_command} {where}".strip() if schema.help_command else ""
    fits = _keys_for(parent, above, settings[path].value)
    hint = _hint(schema, path, list(section.model_fields), fits, parent)
    return f"unknown {what}; allowed: {listed(section.model_fields, command)}{hint}"


def _hint(
    schema: type[Config], path: KeyPath, known: list[str], fits: list[str], parent: Kind | None
) -> str:
    """Return suggestions for an unknown key, with keys of its own section first.

    Args:
        known: keys of the section.
        fits: paths of keys that the value may be meant for.
        parent: the section, or its choices by name.
    """
    key, above = path[-1], path[:-1]
    if (whole := ".".join(path)) in schema.synonyms:
        return did_you_mean([schema.synonyms[whole]])
    if whole in schema.advice:
        return f"; {schema.advice[whole]}"
    close = near_names(key, known, 0.8)
    if close and key not in schema.synonyms and not _is_known_to_a_choice(parent, key):
        # Only misspelt. Keys elsewhere are not looked for, which imports all that have settings.
        return did_you_mean(".".join((*above, name)) for name in close)
    homes = [place for place in places(schema) if key in place.settings.model_fields]
    here = ".".join("0" if part.isdecimal() else part for part in above)
    owners = [place.choice for place in homes if place.path == here and place.choice]
    if owners:
        names = " and ".join(filter(None, [", ".join(owners[:-1]), owners[-1]]))
        return f"; {names} {'has' if len(owners) == 1 else 'have'} {key}"
    meant = [schema.synonyms[key]] if key in schema.synonyms else []
    near = [".".join((*above, name)) for name in near_names(key, known)]
    if any(place.path == here for place in homes):  # of another choice
        return did_you_mean(near)
    elsewhere = [f"{place.path}.{key}" for place in homes]
    if not above:
        return did_you_mean([*meant, *elsewhere] or near)
    own = [name for name in meant if name.startswith(f"{here}.")]
    return did_you_mean([*own, *fits, *near, *elsewhere, *meant])


def _is_known_to_a_choice(parent: Kind | None, key: str) -> bool:
    """Return whether a section with choices may have a key, with another name."""
    if isinstance(parent, OneOf):
        return any(key in parent.widest(name).model_fields for name in parent.registry)
    return isinstance(parent, Discriminated)


def _keys_for(kind: Kind | None, path: KeyPath, value: Any) -> list[str]:
    """Return the keys of a section that `value` may be meant for: the switch, or a choice."""
    found = []
    if isinstance(kind, OneOf):
        found = ["name"] if value in list(kind.registry) else []
        kind = kind.choice(kind.default)
    for key, info in kind.model_fields.items() if isinstance(kind, type) else ():
        if isinstance(kind_of(info), FieldInfo):
            is_switch = key == "enable" and isinstance(value, bool)
            is_choice = isinstance(value, str) and value in names(field_schema(info))
            found += [key] * (is_switch or is_choice)
    return [".".join((*path, key)) for key in found]
