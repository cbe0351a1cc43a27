"""What settings are made of: frozen sections, choices by name, values with their place."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict
from pydantic_core import CoreSchema, core_schema

from torchtitan.config.words import allowed_names

KeyPath = tuple[str, ...]


class ConfigError(ValueError):
    """Something the user wrote is wrong; the message teaches what to write instead."""


class RecipeError(ConfigError):
    """Every mistake of a recipe, one line each."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = list(dict.fromkeys(lines))
        super().__init__("\n".join(self.lines))


class Config(BaseModel):
    """Base of every component's settings: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


@dataclass(frozen=True)
class OneOf:
    """Annotation of a section whose `name` picks its settings class from a registry."""

    registry: Mapping[str, type[Config]]
    default: str

    def choice(self, values: Mapping[str, Any]) -> type[Config] | None:
        """The settings class that `values["name"]` picks, None where there is no such name."""
        name = values.get("name", self.default)
        return self.registry.get(name) if isinstance(name, str) else None

    def _validate(self, value: Any) -> Config:
        if isinstance(value, Config):
            return value
        if not isinstance(value, dict):
            raise ValueError("wanted a section with a `name`")
        settings = self.choice(value)
        if settings is None:
            raise ValueError(f"unknown name; {allowed_names(value['name'], self.registry)}")
        return settings.model_validate_json(json.dumps({"name": self.default} | value), strict=True)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda config: config.model_dump(mode="json")
            ),
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"oneOf": [settings.model_json_schema() for settings in self.registry.values()]}


class Setting(NamedTuple):
    """A value as written and the place where it was written."""

    value: Any
    origin: str


class Problem(NamedTuple):
    """A mistake found by a cross-section check: `path` is dotted, `also` names what it rests on."""

    path: str
    message: str
    also: tuple[str, ...] = ()


class Translation(NamedTuple):
    """What a translation table made of the settings of one source."""

    settings: dict[KeyPath, Setting]
    notices: list[str]
    problems: list[str]
