"""The settings of a recipe as a table: for `--help` and for docs/config.md."""

from collections.abc import Iterator
from typing import NamedTuple

from pydantic.fields import FieldInfo

from torchtitan.config.schema import describe, field_schema, one_of, subsection
from torchtitan.config.settings import Config
from torchtitan.config.words import show


class Entry(NamedTuple):
    """One setting, in words."""

    path: str
    allowed: str
    default: str
    help: str


class Section(NamedTuple):
    """One section, or one choice of a section that has several."""

    name: str
    about: str
    entries: list[Entry]


def sections(schema: type[Config]) -> Iterator[Section]:
    """Every section of a recipe, in order."""
    for name, info in schema.model_fields.items():
        if choice := one_of(info):
            for key, settings in choice.registry.items():
                entries = _entries(name, settings)
                yield Section(f'{name} (name = "{key}")', _about(settings), entries)
        elif settings := subsection(info):
            yield Section(name, _about(settings), _entries(name, settings))


def help_text(schema: type[Config]) -> str:
    """What `--help` prints of the settings."""
    lines = []
    for section in sections(schema):
        lines += ["", f"[{section.name}] {section.about}"]
        for entry in section.entries:
            lines += [
                f"  --{entry.path}  ({entry.allowed}; default: {entry.default})",
                f"      {entry.help}",
            ]
    return "\n".join(lines)


def _about(settings: type[Config]) -> str:
    return (settings.__doc__ or "").strip().splitlines()[0]


def _entries(section: str, settings: type[Config]) -> list[Entry]:
    return [_entry(f"{section}.{key}", info) for key, info in settings.model_fields.items()]


def _entry(path: str, info: FieldInfo) -> Entry:
    assert info.description, f"{path} has no help text"
    default = "none" if info.default is None else show(info.default)
    return Entry(path, describe(field_schema(info)), default, info.description)
