"""Building blocks of settings: frozen sections, choices by name, values with their location."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, SerializationInfo, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from torchtitan.config.words import allowed_names, docstring, told

KeyPath = tuple[str, ...]

BAD_CHOICE: Final = "bad_choice"
"""Type of pydantic's error for a section without a name, or with one in no registry."""


class ConfigError(ValueError):
    """Mistake in the user's input; the message says how to fix it."""

    notices: tuple[str, ...] = ()
    """Notes to report with the message, such as how an old key was read."""


class Unreachable(RuntimeError):
    """Host or process that cannot be reached; a later try may succeed."""


class RecipeError(ConfigError):
    """Every mistake of a recipe, one line each."""

    def __init__(self, lines: Iterable[str], notices: Iterable[str] = ()) -> None:
        self.lines = list(dict.fromkeys(lines))
        self.notices = tuple(notices)
        super().__init__("\n".join(self.lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, since ranks exchange errors."""
        return RecipeError, (self.lines, self.notices)


class CannotRun(RecipeError):
    """Error for settings that are each valid but cannot work together, or not on this machine."""

    def __init__(self, lines: Iterable[str], config: Any, notices: Iterable[str] = ()) -> None:
        super().__init__(lines, notices)
        self.config = config
        """The recipe as it was read."""


class Problem(NamedTuple):
    """Problem with the value at a dotted path, which is valid by itself.

    A settings class finds the problems of its own section, and those that only exist if a recipe
    chooses it, in `Config.problems`. All others between sections are found by a rule, a function of
    the whole recipe in `torchtitan.checks`, so that no section knows the names of another's keys.

    `message` follows "got <value>; ". `also` names the other settings, or sections, it depends on:
    if one of them is invalid itself, the problem is not reported. All paths of a section's own
    problems are within that section, and `self.key` in a message is a key of it.
    """

    path: str
    message: str
    also: tuple[str, ...] = ()
    severity: Literal["error", "note"] = "error"
    """Severity; a note flags a valid setting that may surprise."""
    is_between: bool = False
    """Whether the paths are those of the recipe, instead of relative to a section."""

    def within(self, section: str) -> "Problem":
        """Return a section's own problem as one of the whole recipe."""
        if self.is_between:
            return self
        path, *also = (f"{section}.{name}" for name in (self.path, *self.also))
        message = self.message.replace("self.", f"{section}.")
        return Problem(path, message, tuple(also), self.severity)


@dataclass(frozen=True)
class PlannedWorld:
    """Ranks and machine a recipe is to run on, as far as known."""

    ranks: int | None = None
    """Number of ranks; None: any number that fits the recipe."""
    device_type: str = "cpu"
    is_here: bool = False
    """Whether it runs on this machine, so that missing capabilities are problems too."""
    may_restart: bool = False
    """Whether failed processes are restarted."""
    local_ranks: int | None = None
    """Number of ranks that are started on this machine, as far as known."""


@dataclass(frozen=True)
class Context:
    """Everything that a section may know when it is asked for its problems."""

    recipe: Any = None
    """The whole recipe; None if a section is checked alone."""
    world: PlannedWorld = PlannedWorld()
    key: str = ""
    """The section's own key in the recipe."""


def between(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Mark problems between sections, whose paths are those of the recipe."""
    for problem in problems:
        yield problem._replace(is_between=True)


class Config(BaseModel):
    """Base of every component's settings: frozen, unknown keys and infinities refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )
    synonyms: ClassVar[Mapping[str, str]] = {}
    """Keys of a whole recipe by the names, dotted or not, that other software has for them."""
    advice: ClassVar[Mapping[str, str]] = {}
    """Advice on such keys, dotted, that have no counterpart."""
    help_command: ClassVar[str] = ""
    """Command that, with the name of a section of the recipe, lists its keys."""

    def problems(self, context: Context) -> Iterator[Problem]:
        """Find what cannot work about this section, or between it and other sections.

        Paths are relative to the section; `between` marks problems with paths of the recipe.
        """
        return iter(())


@dataclass(frozen=True)
class OneOf:
    """Annotation of a section whose `name` picks its settings class from a registry.

    A class of `extended` is imported when a recipe has its key; help and hints import all of them.
    """

    registry: Mapping[str, type[Config]]
    default: str | None
    """Default name; None if a section must name its class."""
    extended: Mapping[str, type[Config]] = field(default_factory=dict)
    """Classes that extend one of the registry by a key, by `NAME.key`."""

    def choice(self, name: Any, keys: Iterable[str] = ()) -> type[Config] | None:
        """Return the settings class called `name`, with `keys`; None if there is none."""
        if not isinstance(name, str) or name not in self.registry:
            return None
        paths = (f"{name}.{key}" for key in keys)
        added = tuple(self.extended[path] for path in paths if path in self.extended)
        return _joined(added or (self.registry[name],))

    def widest(self, name: str) -> type[Config]:
        """Return the settings class called `name`, with the keys of all that extend it."""
        keys = (key.partition(".")[2] for key in self.extended if key.startswith(f"{name}."))
        return self.choice(name, keys) or self.registry[name]

    def _validate(self, value: Any) -> Config:
        if isinstance(value, Config):
            return value
        if not isinstance(value, dict):
            raise PydanticCustomError("model_type", "wanted a section")
        got = value.get("name", self.default)
        settings = self.choice(got, value)
        if settings is None:
            allowed = allowed_names(got, self.registry)
            message = f"it has no name; {allowed}" if got is None else f"{told(got)}{allowed}"
            kind = PydanticCustomError(BAD_CHOICE, "{message}", {"message": message})
            line = InitErrorDetails(type=kind, loc=("name",) if got is not None else (), input=got)
            raise ValidationError.from_exception_data("section", [line])
        return settings.model_validate_json(json.dumps(value | {"name": got}), strict=True)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return _chosen_by(self._validate)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        choices = []
        for name in self.registry:
            settings = self.widest(name)
            choice = dict(handler.resolve_ref_schema(handler(settings.__pydantic_core_schema__)))
            named = choice["properties"]["name"] | {"const": name, "default": name}
            choice["properties"] = choice["properties"] | {"name": named}
            if name != self.default:
                choice["required"] = [*choice.get("required", ()), "name"]
            choices.append(choice)
        return {"oneOf": choices, "description": f"One of {', '.join(self.registry)}."}


@dataclass(frozen=True)
class KeyOf:
    """Annotation of a string that is a key of a registry."""

    registry: Mapping[str, Any]

    def _validate(self, value: str) -> str:
        if value not in self.registry:
            raise PydanticCustomError("literal_error", "no key of the registry")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.registry)}


@dataclass(frozen=True)
class Discriminated:
    """Annotation of a section whose keys select its settings class: `base`, or one that extends it.

    A class is imported when a recipe selects it; help and hints import all of them.
    """

    base: type[Config]
    registry: Mapping[str, type[Config]]
    """Classes that extend `base`."""
    choose: Callable[[Mapping[str, Any]], type[Config]]
    """Function from a section's keys and values to its settings class."""

    @property
    def widest(self) -> type[Config]:
        """Settings class with the keys of all."""
        bases = tuple(self.registry.values()) or (self.base,)
        return type(self.base.__name__, bases, {"__doc__": docstring(self.base)})

    def _validate(self, value: Any) -> Config:
        if isinstance(value, Config):
            return value
        if not isinstance(value, dict):
            raise PydanticCustomError("model_type", "wanted a section")
        return self.choose(value).model_validate_json(json.dumps(value), strict=True)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return _chosen_by(self._validate)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return dict(handler.resolve_ref_schema(handler(self.widest.__pydantic_core_schema__)))


@dataclass(frozen=True)
class ListOf:
    """Annotation of a list of sections, `[[name]]`, each chosen from a registry by its `name`.

    A list with sections of one class needs no annotation: the field is a tuple of that class.
    """

    registry: Mapping[str, type[Config]]

    @property
    def item(self) -> OneOf:
        """Annotation of one of the sections."""
        return OneOf(self.registry, None)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        item = self.item.__get_pydantic_core_schema__(source, handler)
        return core_schema.tuple_variable_schema(item)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        names = ", ".join(self.registry)
        items = self.item.__get_pydantic_json_schema__(schema, handler)
        return {"type": "array", "items": items, "description": f"In order, each one of {names}."}


@cache
def _joined(bases: tuple[type[Config], ...]) -> type[Config]:
    """Return a settings class with the keys of all `bases`."""
    if len(bases) == 1:
        return bases[0]
    return type(bases[0].__name__, bases, {"__doc__": docstring(bases[0])})


def _chosen_by(validate: Callable[[Any], Config]) -> CoreSchema:
    return core_schema.no_info_plain_validator_function(
        validate,
        serialization=core_schema.plain_serializer_function_ser_schema(_dump, info_arg=True),
    )


def _dump(config: Config, info: SerializationInfo) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_none=info.exclude_none)


class Setting(NamedTuple):
    """Value as written and its location.

    A section is a setting too, with the value `{}` and the location of its header. So is a list of
    sections, with a list of as many `{}`; the path of each section in it ends in its number.
    """

    value: Any
    origin: str
