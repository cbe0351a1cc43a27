"""The command line: a program's own options, the recipe, and settings as `--section.key value`.

Also `--a.b=v`, `--a.b v w` or `v,w` for lists (one word is not a list where a scalar is allowed),
`none` for an optional setting, and for booleans `--a.b`, `--no-a.b`, `--a.no-b`; `--a.0.b` for the
first section of a list. A hyphen may replace an underscore. Words are converted to the type of
their field, as a command line has no types. The last of repeated flags wins, so that a script can
append its own.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from pydantic.fields import FieldInfo

from torchtitan.config.other_names import OLD_KEYS, Moved
from torchtitan.config.schema import NOUNS, Kind, describe, field_schema, find, json_types
from torchtitan.config.settings import Config, ConfigError, KeyPath, Setting
from torchtitan.config.words import dotted, shorten

ANYTHING = {"boolean", "integer", "number", "string"}
_SETTING = re.compile(r"\w+\.[\w.]+=")


def split_options(
    words: Iterable[str], options: Iterable[str], sections: Collection[str]
) -> tuple[list[str], list[str]]:
    """Split a command line into the words of a program with `options` and the flags of a recipe.

    Raises:
        ConfigError: if an option is misspelt, or a setting in one of `sections` has no dashes.
    """
    own, *groups = _split(words)
    rest: list[str] = []
    known = ["--help", *options]
    for group in groups:
        name = group[0].partition("=")[0]
        # A key of a recipe starts with its section.
        near = [] if "." in name else get_close_matches(name.replace("_", "-"), known, 1, 0.8)
        if near and name not in known:
            raise ConfigError(f"there is no {name}; did you mean {near[0]}?")
        (own if near else rest).extend(group)
    for before, word in pairwise(["", *own]):
        is_setting = word.split(".")[0] in sections and _SETTING.match(word)
        if is_setting and not before.startswith("--"):  # whose value it is: compare --vary
            raise ConfigError(_not_a_flag(word))
    return own, rest


def split_recipe(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the recipe's path, given first or as `--job.config_file`, and the other words."""
    before, *groups = _split(words)
    paths, rest = before[:1], before[1:]
    for group in groups:
        path, values = _key_and_values(group)
        if path != ("job", "config_file"):
            rest += group
        elif values:
            paths += values
        else:
            raise ConfigError(f"{group[0]}: got no value; wanted a recipe")
    if len(paths) > 1:
        got = " and ".join(paths)
        raise ConfigError(f"--job.config_file: got {got}; wanted one recipe")
    return paths[0] if paths else None, rest


def read_flags(
    words: Sequence[str],
    schema: type[Config],
    below: Mapping[KeyPath, Setting],
) -> tuple[dict[KeyPath, Setting], list[str]]:
    """Return the settings that flags make, their sections included, and the errors in the flags.

    `below` are the settings that the flags override; they choose the class of a section unless a
    flag does. A key of an earlier version has the type of its present one.
    """
    settings: dict[KeyPath, Setting] = {}
    wrong: dict[KeyPath, str] = {}
    before, *groups = _split(words)
    flags = [_key_and_values(group) for group in groups]
    renamed = [(_present(path), values) for path, values in flags]
    settled = {**below, **dict(_choosing(renamed))}

    for path, values in flags:
        kind, is_off = find(schema, _present(path), settled), False
        if kind is None and (positive := _without_no(path)):
            path, is_off = positive, True
            kind = find(schema, _present(path), settled)
        origin = f"--{dotted(path)}"
        wrong.pop(path, None)
        try:
            value = _off(values) if is_off else _typed(kind, values)
        except ConfigError as error:
            wrong[path] = f"{origin}: {error}"
            continue
        for depth in range(1, len(path)):
            if not path[depth].isdecimal():  # flags do not set a list as a whole
                settings[path[:depth]] = Setting({}, origin)
        settings[path] = Setting(value, origin)
    return settings, [*map(_not_a_flag, before), *wrong.values()]


def _present(path: KeyPath) -> KeyPath:
    """Return the present path of a key."""
    row = OLD_KEYS.get(dotted(path))
    return tuple(row.to.split(".")) if isinstance(row, Moved) else path


def _split(words: Iterable[str]) -> list[list[str]]:
    """Return the words before the first flag, and each flag with the words that follow it."""
    groups: list[list[str]] = [[]]
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            groups.append([])
        groups[-1].append(word)
    return groups


def _key_and_values(words: Sequence[str]) -> tuple[KeyPath, list[str]]:
    """Return the key of a flag, and its values."""
    name, equals, value = words[0][2:].partition("=")
    return tuple(name.replace("-", "_").split(".")), [*([value] if equals else []), *words[1:]]


def _not_a_flag(word: str) -> str:
    wanted = word if _SETTING.match(word) else "section.key value"
    return f"{shorten(word)}: not a flag; wanted --{shorten(wanted)}"


def _choosing(flags: Iterable[tuple[KeyPath, Sequence[str]]]) -> Iterator[tuple[KeyPath, Setting]]:
    """Yield the settings in flags that may choose the class of a section, and their sections."""
    for path, values in flags:
        for each in filter(None, (path, _without_no(path))):
            yield from ((each[:depth], Setting({}, "")) for depth in range(2, len(each)))
        if values:
            yield path, Setting(values[0], "")


def _without_no(path: KeyPath) -> KeyPath | None:
    """Return the path that `--no-a.b` or `--a.no-b` disables, None for other paths."""
    for index in (0, len(path) - 1):
        if path[index].startswith("no_"):
            return (*path[:index], path[index].removeprefix("no_"), *path[index + 1 :])
    return None


def _off(values: Sequence[str]) -> bool:
    if values:
        raise ConfigError(f"got {shorten(' '.join(values))} after a `no-`; wanted no value")
    return False


def _typed(kind: Kind | None, values: Sequence[str]) -> Any:
    """Convert words to the type of a field; without a field, by their form."""
    if not isinstance(kind, FieldInfo):
        typed = [_word(value, ANYTHING) for value in values]
        return typed if len(typed) > 1 else typed[0] if typed else True
    schema = field_schema(kind)
    kinds = json_types(schema)
    if not values and "boolean" in kinds:
        return True
    if not values:
        raise ConfigError(f"got no value; wanted {describe(schema)}")
    if schema.get("items", {}).get("type") == "array":
        return _json(" ".join(values), schema)
    if "array" in kinds:
        items = [_word(part, kinds) for value in values for part in value.split(",") if part]
        one_will_do = any(part.get("type") in NOUNS for part in schema.get("anyOf", ()))
        return items[0] if one_will_do and len(items) == 1 else items
    if len(values) > 1:
        got = shorten(" ".join(values))
        raise ConfigError(f"got {len(values)} values, {got}; wanted one")
    return _word(values[0], kinds)


def _json(text: str, schema: Mapping[str, Any]) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        wanted = f"wanted {describe(schema)}, as JSON"
        raise ConfigError(f"got {shorten(text)}; {wanted}: {error}") from error


def _whole(word: str) -> int:
    """Convert to an integer; 1e3 is one too."""
    try:
        return int(word)
    except ValueError:
        if not float(word).is_integer():
            raise
        return int(float(word))


def _word(word: str, kinds: set[str]) -> Any:
    if word.lower() in ("true", "false") and "boolean" in kinds:
        return word.lower() == "true"
    if word.lower() == "none" and "null" in kinds:
        return None
    for kind, convert in (("integer", _whole), ("number", float)):
        if kind in kinds:
            try:
                return convert(word)
            except ValueError:
                continue
    return word
