"""Lookup of sections and fields in a tree of settings, and descriptions of their values."""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from torchtitan.config.settings import Config, Discriminated, KeyPath, ListOf, OneOf, Setting

NOUNS = {
    "integer": ("an integer", "integers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "true or false"),
    "string": ("a string", "strings"),
}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


class Several(NamedTuple):
    """A list of sections."""

    item: type[Config] | OneOf


Kind = type[Config] | OneOf | Discriminated | Several | FieldInfo
"""Kind at a path: a section, one chosen by its name or its keys, a list of sections, or a value."""


def kind_of(info: FieldInfo) -> Kind:
    """Return the kind of a field."""
    for item in info.metadata:
        if isinstance(item, OneOf | Discriminated):
            return item
        if isinstance(item, ListOf):
            return Several(item.item)
    kind, items = info.annotation, get_args(info.annotation)
    if isinstance(kind, type) and issubclass(kind, Config):
        return kind
    if get_origin(kind) is tuple and isinstance(items[0], type) and issubclass(items[0], Config):
        return Several(items[0])
    return info


def find(schema: type[Config], path: KeyPath, settings: Mapping[KeyPath, Setting]) -> Kind | None:
    """Return the kind at a path, following the choices by name in `settings`; None if unknown."""
    kind: Kind | None = schema
    for depth, key in enumerate(path):
        if isinstance(kind, Several):
            kind = kind.item if key.isdecimal() else None
        else:
            section = class_at(kind, path[:depth], settings)
            info = section.model_fields.get(key) if section else None
            kind = kind_of(info) if info else None
    return kind


def class_at(
    kind: Kind | None, path: KeyPath, settings: Mapping[KeyPath, Setting]
) -> type[Config] | None:
    """Return the settings class at a path; None if it is not a section, or its name is invalid."""
    if not isinstance(kind, OneOf | Discriminated):
        return kind if isinstance(kind, type) else None
    found = {key: s.value for (*above, key), s in settings.items() if above == [*path]}
    if isinstance(kind, OneOf):
        return kind.choice(found.get("name", kind.default), found)
    return kind.choose(found)


class SettingsNode(NamedTuple):
    """A section of a tree of settings, or one choice of it."""

    path: str
    """Path; for a list of sections that of the first one: `convert.0`."""
    choice: str | None
    settings: type[Config]
    owner: str
    """Choice of the enclosing section that has such a section, if not all have it."""
    within: tuple[str, ...] = ()
    """Choices of the enclosing section that have this one."""


def places(schema: type[Config], path: KeyPath = ()) -> Iterator[SettingsNode]:
    """Yield every section and every choice of it, nested ones after the enclosing one."""
    for key, info in schema.model_fields.items():
        kind, here = kind_of(info), (*path, key)
        if isinstance(kind, Several):
            kind, here = kind.item, (*here, "0")
        if isinstance(kind, FieldInfo):
            continue
        if isinstance(kind, Discriminated):
            kind = kind.widest
        choices: dict[str | None, type[Config]]
        if isinstance(kind, OneOf):
            choices = {name: kind.widest(name) for name in kind.registry}
        else:
            choices = {None: kind}
        for name, settings in choices.items():
            yield SettingsNode(".".join(here), name, settings, "")
        inside: dict[tuple[str, str | None, type[Config]], list[tuple[str, SettingsNode]]] = {}
        for name, settings in choices.items():
            for place in places(settings, here):
                inside.setdefault(place[:3], []).append((name or "", place))
        for found in inside.values():
            name, place = found[0]
            child = place.path.split(".")[len(here)]
            if not all(child in other.model_fields for other in choices.values()):
                place = place._replace(owner=place.owner or name)
            yield place._replace(within=place.within or tuple(filter(None, (n for n, _ in found))))


def flat(config: Config) -> dict[KeyPath, Any]:
    """Return every value of a tree of settings by path, as TOML could hold it."""
    values: dict[KeyPath, Any] = {}
    dump = config.model_dump(mode="json")
    for key, info in type(config).model_fields.items():
        value = getattr(config, key)
        parts: dict[KeyPath, Any] = {(key,): value}
        if isinstance(kind_of(info), Several):
            parts = {(key, str(number)): item for number, item in enumerate(value)}
        for path, part in parts.items():
            below = flat(part) if isinstance(part, Config) else {(): dump[key]}
            values |= {(*path, *rest): leaf for rest, leaf in below.items()}
    return values


@cache
def descriptions(settings: type[Config]) -> Mapping[str, str]:
    """Return the description of each field: the docstring below it, or pydantic's `description`.

    Source files are read for this, which pydantic would do when the class is defined.
    """
    found: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        found |= docstrings(kind)
    fields = settings.model_fields.items()
    return {key: info.description or found.get(key, "") for key, info in fields}


def docstrings(kind: type) -> Mapping[str, str]:
    """Return the docstrings of the fields of a class, or of the members of an enum."""
    return _docstrings(kind.__module__).get(kind.__name__, {})


@cache
def _docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings of the fields of each class in a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # there is no source
        return {}
    found: dict[str, dict[str, str]] = {}
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for field, below in pairwise(kind.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign([ast.Name(id=name)]),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found.setdefault(kind.name, {})[name] = " ".join(text.split())
    return found


def field_schema(info: FieldInfo) -> dict[str, Any]:
    """Return the JSON Schema of the value of one field, constraints included."""
    kind: Any = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False)).json_schema()


def describe(schema: Mapping[str, Any]) -> str:
    """Describe a JSON Schema: `an integer >= 1`, `true or false`, `always, never`."""
    if "anyOf" in schema:
        return " or ".join(describe(part) for part in schema["anyOf"] if part != {"type": "null"})
    if names := _values(schema):
        return ", ".join(map(str, names))
    if schema["type"] == "array":
        items = schema["items"]
        if items["type"] == "array":
            return f"a list, each item {describe(items)}"
        return f"a list of {describe(items) if _values(items) else NOUNS[items['type']][1]}"
    bounds = [f"{sign} {schema[key]}" for key, sign in BOUNDS.items() if key in schema]
    return " ".join([NOUNS[schema["type"]][0], " and ".join(bounds)]).strip()


def names(schema: Mapping[str, Any]) -> list[str]:
    """Return the names that a JSON Schema allows, including those for the items of a list."""
    return [*_values(schema), *(name for part in _parts(schema) for name in names(part))]


def json_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows, including those of the items of a list."""
    own = {schema["type"]} if "type" in schema else set()
    if named := _values(schema):
        own = {"integer" if isinstance(name, int) else "string" for name in named}
    return own.union(*map(json_types, _parts(schema)))


def _values(schema: Mapping[str, Any]) -> list[Any]:
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _parts(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]
