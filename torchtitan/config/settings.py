"""What settings are made of: frozen sections, choices by name, values with their place."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict
from pydantic_core import CoreSchema, core_schema

from torchtitan.config.words import allowed_names, show

KeyPath = tuple[str, ...]


class ConfigError(ValueError):
    """Something the user wrote is wrong; the message teaches what to write instead."""


class RecipeError(ConfigError):
    """Every mistake of a recipe, one line each."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = list(dict.fromkeys(lines))
        super().__init__("\n".join(self.lines))


class Config(BaseModel):
    """Base of every component's settings: frozen, unknown keys and infinities refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


@dataclass(frozen=True)
class OneOf:
    """Annotation of a section whose `name` picks its settings class from a registry."""

    registry: Mapping[str, type[Config]]
    default: str

    def choice(self, name: Any) -> type[Config] | None:
        """The settings class called `name`, None where there is none."""
        return self.registry.get(name) if isinstance(name, str) else None

    def _validate(self, value: Any) -> Config:
        if isinstance(value, Config):
            return value
        if not isinstance(value, dict):
            raise ValueError("wanted a section")
        named = {"name": self.default} | value
        settings = self.choice(named["name"])
        if settings is None:
            got = named["name"]
            raise ValueError(f"name: got {show(got)}; {allowed_names(got, self.registry)}")
        return settings.model_validate(named)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda config: config.model_dump(mode="json")
            ),
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        choices = []
        for name, settings in self.registry.items():
            choice = settings.model_json_schema()
            if name != self.default:
                choice["required"] = [*choice.get("required", ()), "name"]
            choices.append(choice)
        return {"oneOf": choices, "description": f"One of {', '.join(self.registry)}."}


class Setting(NamedTuple):
    """A value as written and the place where it was written.

    A section is a setting too, with the value `{}`: its place is that of its header.
    """

    value: Any
    origin: str


class Problem(NamedTuple):
    """A mistake found by a cross-section check: what is wrong with the value at a dotted path.

    `message` goes on after "got <value>; ". `also` names the other settings, or sections, it
    rests on: where one of them is wrong itself, nothing is said.
    """

    path: str
    message: str
    also: tuple[str, ...] = ()


class Translation(NamedTuple):
    """What a translation table made of the settings of one source."""

    settings: dict[KeyPath, Setting]
    notices: list[str]
    problems: list[str]
