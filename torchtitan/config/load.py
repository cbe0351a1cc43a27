"""Reads a recipe: TOML and `--section.key value` flags become one frozen tree of settings.

The idea: every source (an extended recipe, the recipe, the flags) is a flat mapping from a path to
a value and the place it was written. Later sources win, so precedence is one dictionary merge:
defaults < extended recipe < recipe < flags. The merged mapping is validated once, strictly, and
every mistake is reported together with its place, what was got and what is allowed.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from torchtitan.config.schema import (
    explain,
    field_schema,
    find_field,
    json_types,
    locate,
    origin_of,
)
from torchtitan.config.settings import (
    Config,
    KeyPath,
    Problem,
    RecipeError,
    Setting,
    Translation,
)
from torchtitan.config.sources import read_flags, read_toml

ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class Recipe(Generic[ConfigT]):
    """A loaded recipe: the settings, what was translated, and where each value came from."""

    config: ConfigT
    notices: list[str]
    origins: dict[KeyPath, str] = field(repr=False)


def load(
    schema: type[ConfigT],
    recipe: str | Path | None = None,
    flags: Sequence[str] = (),
    *,
    translate: Callable[[dict[KeyPath, Setting]], Translation],
    prepare: Callable[[dict[KeyPath, Setting]], None],
    check: Callable[[ConfigT], Iterable[Problem]],
) -> Recipe[ConfigT]:
    """Merge defaults, the recipe (with what it extends) and flags into `schema`.

    Raises:
        RecipeError: with all mistakes of all sources, one line each.
    """
    notices: list[str] = []
    problems: list[str] = []
    merged: dict[KeyPath, Setting] = {}
    sources = [*(read_toml(Path(recipe), problems) if recipe else []), read_flags(flags, problems)]
    for source in sources:
        translated = translate(source)
        notices += translated.notices
        problems += translated.problems
        merged |= translated.settings
    merged = {path: setting for path, setting in merged.items() if path[0] != "extends"}
    prepare(merged)
    merged = _type_flags(schema, merged)

    # Mistakes in form are taken out and the rest is checked again, so that a recipe with a
    # misspelt key also hears of degrees that do not multiply.
    wrong: set[str] = set()
    while True:
        try:
            config = schema.model_validate_json(json.dumps(_nest(merged), default=str), strict=True)
            break
        except ValidationError as error:
            found = [locate(schema, item["loc"], merged) for item in error.errors()]
            for path, item in zip(found, error.errors(), strict=True):
                problems.append(explain(schema, path, item, merged))
                wrong.add(".".join(path))
            kept = {p: s for p, s in merged.items() if not any(p[: len(f)] == f for f in found)}
            assert len(kept) < len(merged), f"a default of the recipe is invalid: {error}"
            merged = kept
    place = str(recipe) if recipe else "defaults"
    for problem in check(config):
        if wrong.isdisjoint((problem.path, *problem.also)):
            origin = origin_of(merged, tuple(problem.path.split(".")), place)
            problems.append(f"{origin}: {problem.path}: {problem.message}")
    if problems:
        raise RecipeError(problems)
    return Recipe(config, notices, {path: setting.origin for path, setting in merged.items()})


def _type_flags(schema: type[Config], merged: dict[KeyPath, Setting]) -> dict[KeyPath, Setting]:
    """Give the words of flags the types that their settings ask for."""
    typed = {}
    for path, (value, origin) in merged.items():
        if origin.startswith("--") and isinstance(value, list):
            info = find_field(schema, path, merged)
            kinds = json_types(field_schema(info)) if info else set()
            typed[path] = Setting(_from_words(value, kinds), origin)
        else:
            typed[path] = Setting(value, origin)
    return typed


def _from_words(words: list[str], kinds: set[str]) -> Any:
    if "array" in kinds:
        return [_from_word(part, kinds) for word in words for part in word.split(",") if part]
    if not words:
        return True
    return _from_word(words[0], kinds) if len(words) == 1 else words


def _from_word(word: str, kinds: set[str]) -> Any:
    if word.lower() in ("true", "false") and "boolean" in kinds:
        return word.lower() == "true"
    for kind, convert in (("integer", int), ("number", float)):
        if kind in kinds:
            try:
                return convert(word)
            except ValueError:
                continue
    return word


def _nest(settings: Mapping[KeyPath, Setting]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, setting in settings.items():
        node = tree
        for key in path[:-1]:
            child = node.get(key)
            node[key] = node = child if isinstance(child, dict) else {}
        if not (setting.value == {} and isinstance(node.get(path[-1]), dict)):
            node[path[-1]] = setting.value
    return tree
