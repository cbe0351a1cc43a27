"""Reads a recipe: TOML and `--section.key value` flags become one frozen tree of settings.

The idea: every source (an extended recipe, the recipe, the flags) is a flat mapping from a path to
a value and the place it was written. Later sources win, so precedence is one dictionary merge:
defaults < extended recipe < recipe < flags. Each setting is then validated by itself, strictly, and
what the settings mean together is checked last, with defaults in the place of those that are wrong:
so every mistake is reported in one go, each with its place, what was got and what is allowed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchtitan.config.faults import validate_all
from torchtitan.config.files import read_recipe
from torchtitan.config.flags import read_flags
from torchtitan.config.schema import find_choice, list_of
from torchtitan.config.settings import (
    CannotRun,
    Config,
    KeyPath,
    Problem,
    RecipeError,
    Setting,
    Translation,
)
from torchtitan.config.words import show

ConfigT = TypeVar("ConfigT", bound=Config)
Settings = dict[KeyPath, Setting]


@dataclass(frozen=True)
class Recipe(Generic[ConfigT]):
    """A loaded recipe: the settings, what was translated, and where each value came from."""

    config: ConfigT
    notices: list[str]
    place: str
    origins: dict[KeyPath, str] = field(repr=False)

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Raise CannotRun with a line for each problem, if there are any."""
        if lines := [self.line(problem) for problem in problems]:
            raise CannotRun(lines, self.config)

    def line(self, problem: Problem) -> str:
        """A problem in words: where, which setting, what was got, what is wrong with it."""
        path = tuple(problem.path.split("."))
        value: Any = self.config
        for key in path:
            value = value[int(key)] if isinstance(value, tuple) else getattr(value, key)
        if isinstance(value, tuple):
            value = [getattr(item, "name", item) for item in value]
        # What an entry of a list does not say stands, as it were, under its header.
        place = self.origins.get(path[:2], self.place) if len(path) > 2 else self.place
        origin = self.origins.get(path, place)
        return f"{origin}: {problem.path}: got {show(value)}; {problem.message}"


def load(
    schema: type[ConfigT],
    recipe: str | Path | None = None,
    flags: Sequence[str] = (),
    *,
    over: Sequence[Settings] = (),
    translate: Callable[[Settings, Settings], Translation],
    new_name: Callable[[KeyPath], KeyPath],
    prepare: Callable[[Settings], Iterable[str]],
    check: Callable[[ConfigT], Iterable[Problem]],
) -> Recipe[ConfigT]:
    """Merge defaults, the recipe (with what it extends), what goes over it, and flags.

    Args:
        schema: the tree of settings.
        recipe: a TOML file.
        flags: words of the command line.
        over: settings of other places, which win over the recipe, the later over the earlier.
        translate: reads the settings of one source that has names of an older version; for flags
            it is also given those of the recipe, as written.
        new_name: the present path of an old key.
        prepare: called with all settings before any is validated; returns problems.
        check: what is wrong with settings that are each valid.

    Raises:
        RecipeError: with all mistakes of all sources, one line each; CannotRun where each setting
            is valid by itself.
    """
    problems: list[str] = []
    notices: list[str] = []

    def translated(source: Settings, below: Settings) -> Settings:
        result = translate(source, below)
        notices.extend(result.notices)
        problems.extend(result.problems)
        return result.settings

    files = read_recipe(Path(recipe), problems) if recipe else []
    files += over
    sources = [translated(source, {}) for source in files]
    # What is prepared may add names to choose from, and the type of a flag follows from a choice:
    # so flags are read to learn what to prepare, and once more after it.
    written = {path: setting for source in files for path, setting in source.items()}
    below = {path: setting for source in sources for path, setting in source.items()}
    early, _ = read_flags(flags, schema, below, new_name)
    problems += prepare(below | translate(early, written).settings)

    settings: Settings = {}
    for source in sources:
        settings = _merged(schema, settings, source, notices)
    from_flags, wrong_flags = read_flags(flags, schema, settings, new_name)
    problems += wrong_flags
    settings = _merged(schema, settings, translated(from_flags, written), notices)

    values, faults = validate_all(schema, settings)
    for path, message in faults.items():
        problems.append(f"{settings[path].origin}: {'.'.join(path)}: {message}")
    origins = {
        path: setting.origin
        for path, setting in settings.items()
        if path in values or path[-1].isdigit()
    }
    place = str(recipe) if recipe else "defaults"
    loaded = Recipe(schema.model_validate(_nest(values)), notices, place, origins)
    are_valid = not problems
    for problem in check(loaded.config):
        if not any(_rests_on(problem, path) for path in faults):
            problems.append(loaded.line(problem))
    if problems and are_valid:
        raise CannotRun(problems, loaded.config)
    if problems:
        raise RecipeError(problems)
    return loaded


def _rests_on(problem: Problem, path: KeyPath) -> bool:
    """Whether a problem is about a setting, or about one in the same section where it says so."""
    dotted = ".".join((*path, ""))
    names = [f"{name}." for name in (problem.path, *problem.also)]
    return any(name.startswith(dotted) or dotted.startswith(name) for name in names)


def _merged(schema: type[Config], below: Settings, above: Settings, notices: list[str]) -> Settings:
    """The settings of two sources; where `above` chooses anew, what it does not have is left out.

    A recipe that changes the optimizer of what it extends need not undo the settings of that one. A
    list of sections takes the place of the one below it: nobody could tell which correspond.
    """
    lists = {name for name, info in schema.model_fields.items() if list_of(info)}
    replaced = {path[0] for path in above if len(path) == 1} & lists
    below = {path: setting for path, setting in below.items() if path[0] not in replaced}
    merged = below | above
    for (*section, last), name in above.items():
        choice = find_choice(schema, tuple(section), merged) if last == "name" else None
        if choice is None:
            continue
        was = below.get((*section, "name"))
        now, before = choice.choice(name.value), choice.choice(was.value if was else choice.default)
        if now is None or before is None or now is before:
            continue
        for key in before.model_fields:
            path = (*section, key)
            if path in below and path not in above and key not in now.model_fields:
                del merged[path]
                notices.append(
                    f"{name.origin}: {'.'.join(section)}.name: {name.value} has no {key}; "
                    f"{show(below[path].value)} of {below[path].origin} is left out"
                )
    return merged


def _nest(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree
