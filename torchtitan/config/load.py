"""Loading of recipes: TOML and `--section.key value` flags become one frozen tree of settings.

Every source (an extended recipe, the recipe, the flags) is a flat mapping from a path to a value
and its location. Later sources win, so precedence is one dictionary merge: defaults < extended
recipe < recipe < flags. Each setting is then validated by itself, strictly, and settings are
checked together last, with defaults in place of the invalid ones: so all mistakes are reported at
once, each with its location, the value and the allowed values.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from torchtitan.config.faults import validate_all
from torchtitan.config.files import find_recipe, read_recipe
from torchtitan.config.flags import read_flags
from torchtitan.config.other_names import translate
from torchtitan.config.schema import class_at, find
from torchtitan.config.settings import CannotRun, Config, KeyPath, Problem, RecipeError, Setting
from torchtitan.config.words import dotted, holds_sections, located, show

ConfigT = TypeVar("ConfigT", bound=Config)
Settings = dict[KeyPath, Setting]


@dataclass(frozen=True)
class Recipe(Generic[ConfigT]):
    """A loaded recipe: the settings, their notes, and the source of each value."""

    config: ConfigT
    notices: list[str]
    place: str
    origins: dict[KeyPath, str] = field(repr=False)

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Raise CannotRun with a line for each problem that is an error, if there are any."""
        if lines := [self.line(problem) for problem in problems if problem.severity == "error"]:
            raise CannotRun(lines, self.config, self.notices)

    def line(self, problem: Problem) -> str:
        """Describe a problem: the location, the setting, its value and the fault."""
        path = tuple(problem.path.split("."))
        value: Any = self.config
        for key in path:
            value = value[int(key)] if isinstance(value, tuple) else getattr(value, key)
        got = "" if isinstance(value, Config) else "got {}; "
        if isinstance(value, tuple):
            value = [getattr(item, "name", item) for item in value]
            got = "" if None in value else got
        # An absent key of a list entry is reported at the entry's header.
        headers = [path[:depth] for depth in range(2, len(path)) if path[depth - 1].isdecimal()]
        places = [self.origins[above] for above in (*headers, path) if above in self.origins]
        origin = places[-1] if places else self.place
        return f"{located(origin, problem.path)}: {got.format(show(value))}{problem.message}"


@dataclass
class Gathered:
    """Merged settings of all sources, with the notices and problems from reading them."""

    settings: Settings
    place: str
    """Location of values that no source sets: the recipe."""
    notices: list[str]
    problems: list[str]


class Sources(NamedTuple):
    """Settings of files as they were read, the later over the earlier."""

    settings: list[Settings]
    place: str
    """Location of values that no source sets: the recipe."""
    notices: list[str]
    problems: list[str]


def read_sources(recipe: str | Path | None) -> Sources:
    """Read a TOML file, or the packaged recipe of that name, with what it extends."""
    if recipe is None:
        return Sources([], "defaults", [], [])
    file, problems = find_recipe(recipe), list[str]()
    is_packaged = file != Path(recipe)
    notices = [f"{recipe}: the packaged recipe {file}"] if is_packaged else []
    return Sources(read_recipe(file, problems), str(file), notices, problems)


def gather(
    schema: type[Config],
    sources: Sources,
    flags: Sequence[str],
    over: Sequence[Settings],
    prepare: Callable[[Settings], Iterable[str]],
) -> Gathered:
    """Merge what was read and flags, with keys of earlier versions under their present names.

    Args:
        schema: the tree of settings.
        flags: words of the command line, which win over all.
        over: settings of other places, which win over the sources, the later over the earlier.
        prepare: called with all settings before the types of flags are known; returns problems.
    """
    problems, notices = [*sources.problems], [*sources.notices]

    def renamed(source: Settings) -> Settings:
        result = translate(source)
        notices.extend(result.notices)
        problems.extend(result.problems)
        return result.settings

    files = [renamed(source) for source in (*sources.settings, *over)]
    # What is prepared may add names to choose from, and the type of a flag follows from a choice:
    # so flags are read to learn what to prepare, and once more after it.
    below = {path: setting for source in files for path, setting in source.items()}
    early, _ = read_flags(flags, schema, below)
    problems += prepare(below | translate(early).settings)

    settings = merge(schema, files, notices)
    from_flags, wrong_flags = read_flags(flags, schema, settings)
    problems += wrong_flags
    settings = merge(schema, [settings, renamed(from_flags)], notices)
    return Gathered(settings, sources.place, notices, problems)


def load(
    schema: type[ConfigT], gathered: Gathered, check: Callable[[ConfigT], Iterable[Problem]]
) -> Recipe[ConfigT]:
    """Build the tree of settings, with defaults for unset values.

    Args:
        schema: the tree of settings.
        gathered: the settings read; its problems are reported with those found here.
        check: finds problems among settings that are each valid.

    Raises:
        RecipeError: with all mistakes of all sources, one line each; CannotRun if each setting is
            valid by itself.
    """
    settings, problems, notices = gathered.settings, gathered.problems, gathered.notices
    config, faults, sound = validate_all(schema, settings)
    for path, message in faults.items():
        problems.append(f"{located(settings[path].origin, dotted(path))}: {message}")
    origins = {
        path: setting.origin
        for path, setting in sound.items()
        if path[-1].isdecimal() or not (setting.value == {} or holds_sections(setting.value))
    }
    loaded = Recipe(config, notices, gathered.place, origins)
    are_valid, notes = not problems, list[str]()
    for problem in check(loaded.config):
        if not any(_rests_on(problem, path) for path in faults):
            lines = problems if problem.severity == "error" else notes
            lines.append(loaded.line(problem))
    if not problems:  # else a note may be due to one
        notices += notes
    problems = _sorted(problems, gathered.place)
    if problems and are_valid:
        raise CannotRun(problems, loaded.config, notices)
    if problems:
        raise RecipeError(problems, notices)
    return loaded


def _sorted(lines: list[str], recipe: str) -> list[str]:
    """Sort mistakes by file and line; those of a whole file, then those of flags, are last."""
    found = {line: re.match(r"(.+?)(?::(\d+))?: ", line) for line in lines}
    files = list(dict.fromkeys([*(m[1] for m in found.values() if m and m[2]), recipe]))

    def place(line: str) -> tuple[float, float]:
        match = found[line]
        if match is None or match[1] not in files:
            return float("inf"), 0
        return files.index(match[1]), float(match[2] or "inf")

    return sorted(lines, key=place)


def _rests_on(problem: Problem, path: KeyPath) -> bool:
    """Whether a problem depends on the setting at `path`, or on one within or around it."""
    dotted = ".".join((*path, ""))
    names = [f"{name}." for name in (problem.path, *problem.also)]
    return any(name.startswith(dotted) or dotted.startswith(name) for name in names)


def merge(schema: type[Config], sources: Iterable[Settings], notices: list[str]) -> Settings:
    """Merge the settings of all sources, where later ones win; dropped ones get notices."""
    merged: Settings = {}
    for source in sources:
        merged = _merged(schema, merged, source, notices)
    return merged


def _merged(schema: type[Config], below: Settings, above: Settings, notices: list[str]) -> Settings:
    """Merge the settings of two sources; a section chosen in `above` replaces the one below.

    A recipe that changes the optimizer of the recipe it extends need not undo its settings. A list
    of sections replaces the one below it, as their correspondence is unknown.
    """
    lists = {path for path, setting in above.items() if isinstance(setting.value, list)}
    below = {
        path: setting
        for path, setting in below.items()
        if not any(path[:depth] in lists for depth in range(1, len(path)))
    }
    merged = below | above
    for (*path_of_section, last), name in above.items():
        section = tuple(path_of_section)
        kind = find(schema, section, merged)
        now, before = class_at(kind, section, merged), class_at(kind, section, below)
        if last != "name" or now is None or before is None or now is before:
            continue
        gone = {(*section, key) for key in before.model_fields.keys() - now.model_fields.keys()}
        for path in below:
            if path[: len(section) + 1] in gone and path not in above:
                del merged[path]
                if path in gone:
                    value, origin = below[path]
                    gone_value = "a section" if value == {} else show(value)
                    notices.append(
                        f"{located(name.origin, dotted((*section, 'name')))}: {name.value} has no "
                        f"{path[-1]}; {gone_value} of {origin} is left out"
                    )
    return merged
