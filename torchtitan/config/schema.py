"""Asks a tree of settings about its fields, and explains what is wrong with a value."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from torchtitan.config.settings import Config, KeyPath, OneOf, Setting
from torchtitan.config.words import nearest, show


def find_field(
    schema: type[Config], path: KeyPath, settings: Mapping[KeyPath, Setting]
) -> FieldInfo | None:
    """The field at `path`, following the choice that `settings` make where a section has one."""
    fields = _fields_at(schema, path[:-1], settings)
    return fields.get(path[-1]) if fields and path else None


def _fields_at(
    schema: type[Config], section: KeyPath, settings: Mapping[KeyPath, Setting]
) -> dict[str, FieldInfo] | None:
    node: type[Config] | None = schema
    for depth, key in enumerate(section, 1):
        info = node.model_fields.get(key) if node else None
        if info is None:
            return None
        if choice := one_of(info):
            named = settings.get((*section[:depth], "name"))
            name = named.value if named else choice.default
            node = choice.choice({"name": name[0] if isinstance(name, list) and name else name})
        else:
            node = subsection(info)
    return dict(node.model_fields) if node else None


def one_of(info: FieldInfo) -> OneOf | None:
    """The registry that a field chooses from, if it does."""
    return next((item for item in info.metadata if isinstance(item, OneOf)), None)


def subsection(info: FieldInfo) -> type[Config] | None:
    """The settings class of a field that is a section."""
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Config) else None


def field_schema(info: FieldInfo) -> dict[str, Any]:
    """JSON Schema of one field, constraints included."""
    kind: Any = info.annotation
    return TypeAdapter(Annotated[kind, *info.metadata] if info.metadata else kind).json_schema()


def json_types(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema admits; `array` also stands for the types of its items."""
    kinds = {schema["type"]} if "type" in schema else set()
    for value in schema.get("enum", [schema["const"]] if "const" in schema else []):
        kinds.add("string" if isinstance(value, str) else "integer")
    for part in _parts(schema):
        kinds |= json_types(part)
    return kinds


def describe(schema: Mapping[str, Any]) -> str:
    """A JSON Schema in words: "an integer >= 1", "true or false", "one of a, b"."""
    if "anyOf" in schema:
        parts = [describe(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(parts)
    if "enum" in schema:
        return "one of " + ", ".join(show(value) for value in schema["enum"])
    if "const" in schema:
        return show(schema["const"])
    if schema.get("type") == "array":
        return "a list of " + describe(schema.get("items", {})).removeprefix("a ")
    words = {
        "integer": "an integer",
        "number": "a number",
        "boolean": "true or false",
        "string": "a string",
        "object": "a section",
    }
    bounds = {
        "minimum": ">=",
        "exclusiveMinimum": ">",
        "maximum": "<=",
        "exclusiveMaximum": "<",
    }
    limits = [f"{sign} {schema[key]}" for key, sign in bounds.items() if key in schema]
    return " ".join([words.get(schema.get("type", ""), "a value"), " and ".join(limits)]).strip()


def locate(
    schema: type[Config], loc: tuple[int | str, ...], settings: Mapping[KeyPath, Setting]
) -> KeyPath:
    """The path of the setting that a validation error is about.

    Pydantic appends the index of an item or the branch of a union to the path of the field.
    """
    path: KeyPath = tuple(str(part) for part in loc)
    while len(path) > 1 and find_field(schema, path, settings) is None and path not in settings:
        if _fields_at(schema, path[:-1], settings) is not None:
            break  # an unknown key of a known section
        path = path[:-1]
    return path


def explain(
    schema: type[Config], path: KeyPath, error: Any, settings: Mapping[KeyPath, Setting]
) -> str:
    origin, dotted = origin_of(settings, path, "recipe"), ".".join(path)
    if error["type"] == "extra_forbidden":
        return f"{origin}: {dotted}: {_unknown(schema, path, settings)}"
    if error["type"] == "value_error" and (info := find_field(schema, path, settings)):
        choice = one_of(info)
        if choice and (name := settings.get((*path, "name"))):
            text = f"got {show(name.value)}; {error['ctx']['error']}"
            return f"{name.origin}: {dotted}.name: {text}"
    got = settings[path].value if path in settings else error["input"]
    if error["type"] == "value_error":
        return f"{origin}: {dotted}: got {show(got)}; {error['ctx']['error']}"
    info = find_field(schema, path, settings)
    if info is None:
        return f"{origin}: {dotted}: got {show(got)}; {error['msg']}"
    allowed = field_schema(info) if subsection(info) is None else {"type": "object"}
    hint = nearest(got, _choices(allowed)) if isinstance(got, str) else ""
    return f"{origin}: {dotted}: got {show(got)}; wanted {describe(allowed)}{hint}"


def _unknown(schema: type[Config], path: KeyPath, settings: Mapping[KeyPath, Setting]) -> str:
    siblings = _fields_at(schema, path[:-1], settings) or {}
    what = "section" if len(path) == 1 else "key"
    if near := nearest(path[-1], siblings, prefix=".".join(path[:-1])):
        return f"unknown {what}{near}"
    homes = [
        f"{section}.{path[-1]}"
        for section, info in schema.model_fields.items()
        if path[-1] in (_fields_at(schema, (section,), settings) or {})
    ]
    if homes:
        return f"unknown {what}; did you mean {' or '.join(homes)}?"
    return f"unknown {what}; [{'.'.join(path[:-1])}] has {', '.join(sorted(siblings))}".replace(
        "[] has", "the sections are"
    )


def _choices(schema: Mapping[str, Any]) -> list[str]:
    values = list(schema.get("enum", [schema["const"]] if "const" in schema else []))
    for part in _parts(schema):
        values += _choices(part)
    return [value for value in values if isinstance(value, str)]


def origin_of(settings: Mapping[KeyPath, Setting], path: KeyPath, otherwise: str) -> str:
    if path in settings:
        return settings[path].origin
    inside = [s.origin for p, s in settings.items() if p[: len(path)] == path]
    return inside[0] if inside else otherwise


def _parts(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]
