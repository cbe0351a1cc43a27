"""Reads recipes and flags that may have keys of TorchTitan into settings of this version."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torchtitan.config import (
    Config,
    Gathered,
    KeyPath,
    Setting,
    find,
    find_recipe,
    merge,
    read_flags,
    read_recipe,
)
from torchtitan.legacy_recipes.translating import new_name, translate
from torchtitan.legacy_recipes.version_defaults import version_defaults

Settings = dict[KeyPath, Setting]


def gather(
    schema: type[Config],
    recipe: str | Path | None,
    flags: Sequence[str],
    over: Sequence[Settings],
    prepare: Callable[[Settings], Iterable[str]],
) -> Gathered:
    """Read the recipe (with what it extends), what goes over it, and flags: the later win.

    Args:
        schema: the tree of settings.
        recipe: a TOML file, or the name of a packaged recipe.
        flags: words of the command line.
        over: settings of other places, which win over the recipe, the later over the earlier.
        prepare: called with all settings before the types of flags are known; returns problems.
    """
    problems: list[str] = []
    notices: list[str] = []

    def translated(source: Settings, below: Settings) -> Settings:
        result = translate(source, below)
        notices.extend(result.notices)
        problems.extend(result.problems)
        return result.settings

    file = find_recipe(recipe) if recipe else None
    if file and file != Path(str(recipe)):
        notices.append(f"{recipe}: the packaged recipe {file}")
    files = read_recipe(file, problems) if file else []
    files += over
    sources = [translated(source, {}) for source in files]
    # What is prepared may add names to choose from, and the type of a flag follows from a choice:
    # so flags are read to learn what to prepare, and once more after it.
    written = {path: setting for source in files for path, setting in source.items()}
    below = {path: setting for source in sources for path, setting in source.items()}
    early, _ = read_flags(flags, schema, below, new_name)
    problems += prepare(below | translate(early, written).settings)

    settings = merge(schema, sources, notices)
    from_flags, wrong_flags = read_flags(flags, schema, settings, new_name)
    problems += wrong_flags
    settings = merge(schema, [settings, translated(from_flags, written)], notices)
    rest = version_defaults(files if file else (), from_flags, settings)
    notices += rest.notices
    problems += rest.problems
    lowest = {path: s for path, s in rest.settings.items() if find(schema, path, settings)}
    place = str(file) if file else "defaults"
    return Gathered(lowest | settings, place, notices, problems)
