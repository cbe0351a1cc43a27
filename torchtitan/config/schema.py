"""Asks a tree of settings about its sections and fields, and describes what a field holds."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from torchtitan.config.settings import Config, KeyPath, ListOf, OneOf, Setting

NOUNS = {
    "integer": ("an integer", "integers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "true or false"),
    "string": ("a string", "strings"),
}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def one_of(info: FieldInfo) -> OneOf | None:
    """The registry that a section is chosen from, if it is."""
    return next((item for item in info.metadata if isinstance(item, OneOf)), None)


def list_of(info: FieldInfo) -> ListOf | None:
    """The registry that a list of sections is chosen from, if it is."""
    return next((item for item in info.metadata if isinstance(item, ListOf)), None)


def subsection(info: FieldInfo) -> type[Config] | None:
    """The settings class of a field that is a section."""
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Config) else None


def is_section(info: FieldInfo) -> bool:
    """Whether a field is a section, chosen by name or not."""
    return bool(one_of(info) or subsection(info))


def classes(schema: type[Config]) -> Iterator[tuple[str, str | None, type[Config]]]:
    """(section, choice, settings class) for every section and every choice of it.

    Of a list of sections it is the first one: `convert.0`.
    """
    for name, info in schema.model_fields.items():
        if choice := one_of(info):
            yield from ((name, key, settings) for key, settings in choice.registry.items())
        elif several := list_of(info):
            yield from ((f"{name}.0", key, settings) for key, settings in several.registry.items())
        elif one := subsection(info):
            yield name, None, one


def section_class(
    schema: type[Config], section: KeyPath, settings: Mapping[KeyPath, Setting]
) -> type[Config] | None:
    """The settings class of a section, following the choice that `settings` make by `name`."""
    if not section:
        return schema
    if choice := find_choice(schema, section, settings):
        name = settings.get((*section, "name"))
        return choice.choice(name.value if name else choice.default)
    info = find_field(schema, section, settings)
    return subsection(info) if info else None


def find_choice(
    schema: type[Config], section: KeyPath, settings: Mapping[KeyPath, Setting]
) -> OneOf | None:
    """The registry that the section at a path is chosen from, if it is."""
    if info := find_field(schema, section, settings):
        return one_of(info)
    several = find_list(schema, section[:-1], settings)
    return several.item if several and section[-1].isdecimal() else None


def find_list(
    schema: type[Config], path: KeyPath, settings: Mapping[KeyPath, Setting]
) -> ListOf | None:
    """The registry that the sections in the list at a path are chosen from, if it is a list."""
    info = find_field(schema, path, settings)
    return list_of(info) if info else None


def find_field(
    schema: type[Config], path: KeyPath, settings: Mapping[KeyPath, Setting]
) -> FieldInfo | None:
    """The field at `path`, None where there is none."""
    if not path:
        return None
    section = section_class(schema, path[:-1], settings)
    return section.model_fields.get(path[-1]) if section else None


def validate(info: FieldInfo, value: Any) -> Any:
    """A value that TOML can hold, as the field holds it.

    Raises:
        pydantic.ValidationError: where the field does not allow it; "20" and true are no numbers.
    """
    # In JSON, unlike in Python, a list is a strict tuple. A date has no JSON form; as an object it
    # fits no field.
    text = json.dumps(value, default=lambda date: {"date": str(date)})
    return _adapter(info).validate_json(text)


def field_schema(info: FieldInfo) -> dict[str, Any]:
    """JSON Schema of the value of one field, constraints included."""
    return _adapter(info).json_schema()


def _adapter(info: FieldInfo) -> TypeAdapter[Any]:
    kind: Any = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def describe(schema: Mapping[str, Any]) -> str:
    """A JSON Schema in words: `an integer >= 1`, `true or false`, `always, never`."""
    if "anyOf" in schema:
        return " or ".join(describe(part) for part in schema["anyOf"] if part != {"type": "null"})
    if names := _values(schema):
        return ", ".join(names)
    if schema["type"] == "array":
        items = schema["items"]
        if items["type"] == "array":
            return f"a list, each item {describe(items)}"
        return f"a list of {describe(items) if _values(items) else NOUNS[items['type']][1]}"
    bounds = [f"{sign} {schema[key]}" for key, sign in BOUNDS.items() if key in schema]
    return " ".join([NOUNS[schema["type"]][0], " and ".join(bounds)]).strip()


def names(schema: Mapping[str, Any]) -> list[str]:
    """The names that a JSON Schema admits, those for the items of a list included."""
    return [*_values(schema), *(name for part in _parts(schema) for name in names(part))]


def json_types(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema admits; those of the items of a list included."""
    own = {"string"} if _values(schema) else {schema["type"]} if "type" in schema else set()
    return own.union(*map(json_types, _parts(schema)))


def _values(schema: Mapping[str, Any]) -> list[str]:
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _parts(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]
