"""The command line: a program's own options, the recipe, and settings as `--section.key value`.

Also `--a.b=v`; for lists `--a.b v w` or `v,w` (one word is not a list where a scalar is allowed),
or a JSON array, whose items may have commas; `none` for an optional setting, and for booleans
`--a.b`, `--no-a.b`, `--a.no-b`; `--a.0.b` for the first section of a list. A hyphen may replace an
underscore. Words are converted to the type of their field, as a command line has no types. The last
of repeated flags wins, so that a script can append its own. `--help` lists all settings.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import ModelSchema

from torchtitan.config.other_names import Moved, old_key
from torchtitan.config.schema import (
    NOUNS,
    Kind,
    class_at,
    describe,
    descriptions,
    field_schema,
    find,
    json_types,
    kind_of,
    names,
    places,
)
from torchtitan.config.settings import Config, ConfigError, KeyPath, OneOf, Setting
from torchtitan.config.words import allowed_names, docstring, dotted, near_names, shorten, show

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
    words: Sequence[str], schema: type[Config], below: Mapping[KeyPath, Setting]
) -> tuple[dict[KeyPath, Setting], list[str]]:
    """Return the settings that flags make, their sections included, and the errors in the flags.

    `below` are the settings that the flags override; they choose the class of a section unless a
    flag does. A key of an earlier version has the type of its present one, and a key of a misspelt
    section or choice that of the nearest.
    """
    settings: dict[KeyPath, Setting] = {}
    wrong: dict[KeyPath, str] = {}
    before, *groups = _split(words)
    flags = [_key_and_values(group) for group in groups]
    renamed = [(_meant(path, schema), values) for path, values in flags]
    settled = {**below, **dict(_choosing(renamed))}
    settled |= dict(_nearest_choices(schema, settled))

    for path, values in flags:
        kind, is_off = find(schema, _meant(path, schema), settled), False
        if kind is None and (positive := _strip_no(path)):
            path, is_off = positive, True
            kind = find(schema, _meant(path, schema), settled)
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


def _meant(path: KeyPath, schema: type[Config]) -> KeyPath:
    """Return the present path of a key, in the nearest section if its own is unknown."""
    row = old_key(path)
    section, *rest = row.to.split(".") if isinstance(row, Moved) else path
    if section not in schema.model_fields and not section.startswith("no_"):
        section = next(iter(near_names(section, schema.model_fields)), section)
    return (section, *rest)


def _nearest_choices(
    schema: type[Config], settings: Mapping[KeyPath, Setting]
) -> Iterator[tuple[KeyPath, Setting]]:
    """Yield the nearest name, or else the default, for each name of no choice."""
    for (*above, last), name in settings.items():
        kind = find(schema, tuple(above), settings) if last == "name" else None
        if isinstance(kind, OneOf) and class_at(kind, tuple(above), settings) is None:
            likely = next(iter([*near_names(name.value, kind.registry), kind.default]))
            yield (*above, last), Setting(likely, "")


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
        for each in filter(None, (path, _strip_no(path))):
            yield from ((each[:depth], Setting({}, "")) for depth in range(2, len(each)))
        if values:
            yield path, Setting(values[0], "")


def _strip_no(path: KeyPath) -> KeyPath | None:
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
    text = " ".join(values)
    if schema.get("items", {}).get("type") == "array" or ("array" in kinds and is_array(text)):
        return _json(text, schema)
    if "array" in kinds:
        items = [_word(part, kinds) for value in values for part in value.split(",") if part]
        one_will_do = any(part.get("type") in NOUNS for part in schema.get("anyOf", ()))
        return items[0] if one_will_do and len(items) == 1 else items
    if len(values) > 1:
        got = shorten(" ".join(values))
        raise ConfigError(f"got {len(values)} values, {got}; wanted one")
    return _word(values[0], kinds)


def is_array(text: str) -> bool:
    """Whether the value of a flag is a JSON array, whose items may have commas."""
    return text.startswith("[") and text.endswith("]")


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


class HelpEntry(NamedTuple):
    """One setting, as text."""

    path: str
    allowed: str
    default: str
    help: str
    values: Sequence[str]
    """Values to choose from, if they have names."""


class HelpSection(NamedTuple):
    """One section, or one choice of a section that has several."""

    path: str
    """Path; for a list of sections that of the first one: `convert.0`."""
    choice: str | None
    owner: str
    """Choice of the enclosing section that has such a section, if not all have it."""
    within: Sequence[str]
    """Choices of the enclosing section that have this one."""
    kind: str
    """Settings class, which several choices may share."""
    about: str
    entries: list[HelpEntry]

    @property
    def name(self) -> str:
        """Path without numbers."""
        return ".".join(key for key in self.path.split(".") if key != "0")

    @property
    def header(self) -> str:
        """Header in TOML: `[optimizer]`, `[[convert]]`."""
        return f"[[{self.name}]]" if self.path.endswith(".0") else f"[{self.name}]"

    @property
    def title(self) -> str:
        """Header, with the choice: `[optimizer] with name = "Muon"`."""
        return f'{self.header} with name = "{self.choice}"' if self.choice else self.header


def all_sections(schema: type[Config]) -> list[HelpSection]:
    """Return every section of a recipe, in order, and every choice of it."""
    return [
        HelpSection(
            path,
            choice,
            owner,
            within,
            f"{settings.__module__}.{settings.__qualname__}",
            docstring(settings).partition("\n")[0],
            [*_entries(path, settings)],
        )
        for path, choice, settings, owner, within in places(schema)
    ]


def sections(
    everything: Iterable[HelpSection], chosen: Mapping[str, str] | None = None
) -> Iterator[HelpSection]:
    """Yield the sections to show, a class shared by several choices only once.

    `chosen` maps sections to their names, which leaves out the other choices.
    """
    found, shown = list(everything), set[tuple[str, str]]()
    named = {name for name in (chosen or {}).items() if name in {part[:2] for part in found}}
    homes, names = [path for path, _ in named], [name for _, name in named]
    for section in found:
        is_other = section.path in homes and (section.path, section.choice) not in named
        is_within = any(section.path.startswith(f"{home}.") for home in homes)
        if is_other or (is_within and section.within and not {*names} & {*section.within}):
            continue
        if (section.path, section.kind) in shown:
            continue
        shown.add((section.path, section.kind))
        if section.owner and not is_within:
            section = section._replace(about=f"(Only for {section.owner}.) {section.about}")
        yield section


def help_sections(
    everything: Iterable[HelpSection], about: str = "", flags: Iterable[str] = ()
) -> list[HelpSection]:
    """Return the sections to show for `--help about`.

    Args:
        everything: all sections of a recipe.
        about: a section, or one of its keys; all of them if empty.
        flags: words of the command line; `--optimizer.name Muon` leaves out the other optimizers.

    Raises:
        ConfigError: if there is no such section.
    """
    words = " ".join(flags).replace("=", " ").split()
    chosen = {
        flag.removeprefix("--").removesuffix(".name"): name
        for flag, name in pairwise(words)
        if flag.startswith("--") and flag.endswith(".name")
    }
    shown = list(sections(everything, chosen))
    if found := [part for section in shown if (part := _about(section, about))]:
        return found
    known = dict.fromkeys(section.name for section in shown)
    raise ConfigError(f"--help: got {shorten(about)}; {allowed_names(about, known)}")


def _about(section: HelpSection, about: str) -> HelpSection | None:
    """Return the part of a section called `about`: all of it, one key, or nothing."""
    about = about.strip("[]").replace("-", "_")
    name = section.name
    if not about or f"{name}.".startswith(f"{about}."):
        return section
    entries = [entry for entry in section.entries if entry.path in (about, f"{name}.0.{about}")]
    return section._replace(entries=entries) if entries else None


def json_schema(schema: type[Config]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a recipe, for editors."""
    tree = schema.model_json_schema(schema_generator=_DescribedSchema)
    extends = {"type": "string", "description": "Recipe to inherit from, relative to this one."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **tree,
        "properties": {"extends": extends, **tree["properties"]},
    }


class _DescribedSchema(GenerateJsonSchema):
    def model_schema(self, schema: ModelSchema) -> dict[str, Any]:
        found, settings = super().model_schema(schema), cast(type[Config], schema["cls"])
        for key, text in descriptions(settings).items():
            if text:
                found["properties"][key].setdefault("description", text)
        return found


@cache
def _entries(path: str, settings: type[Config]) -> tuple[HelpEntry, ...]:
    """Return the entries of a section; making the schemas of all fields takes a second."""
    return tuple(
        _entry(f"{path}.{key}", info, descriptions(settings).get(key, ""))
        for key, info in settings.model_fields.items()
        if isinstance(kind_of(info), FieldInfo)
    )


def _entry(path: str, info: FieldInfo, text: str) -> HelpEntry:
    assert text, f"{path} has no help text"
    default = "none" if info.default is None else show(info.default)
    default = "required" if info.is_required() else default
    schema = field_schema(info)
    values = names(schema) or ["true", "false"] * ("boolean" in json_types(schema))
    return HelpEntry(path, describe(schema), default, text, list(map(str, values)))
