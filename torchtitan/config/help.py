"""The settings of a recipe as a table: for `--help` and for docs/config.md."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import ModelSchema

from torchtitan.config.schema import (
    describe,
    descriptions,
    field_schema,
    json_types,
    kind_of,
    names,
    places,
)
from torchtitan.config.settings import Config, ConfigError
from torchtitan.config.words import allowed_names, docstring, shorten, show


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
            *(path, choice, owner, within, f"{settings.__module__}.{settings.__qualname__}"),
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
