"""Commands of the command line: how their help looks, and how a shell completes their words.

Verbs import torch, which takes longer than a completion may. So the options of all verbs, and the
settings of recipes, are kept in a file in the user's cache folder, which is written again when a
file of the package has changed.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from typer.core import TyperCommand, TyperGroup

from torchtitan.config import packaged_recipes

PACKAGE = Path(__file__).parents[1]

OptionTable = Mapping[str, tuple[str, list[str] | None]]
"""Help of each option, and the values to offer for it; None if it takes no value."""


class CompletionTable(NamedTuple):
    """Words that a shell completes."""

    verbs: Mapping[str, OptionTable]
    """Options by verb; those of a verb in a group by both names: `checkpoint ls`."""
    recipe_verbs: list[str]
    """Verbs that take a recipe, its settings and `--help SECTION`."""
    settings: OptionTable
    sections: Mapping[str, str]


class Completion(NamedTuple):
    """A word that the shell may complete to, as typer wants it."""

    value: str
    help: str = ""
    type: str = "plain"


class Command(TyperCommand):
    """A verb; its help shows no type for options without a value, and no default but the text's."""

    takes_recipe = False

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


class VerbGroup(TyperGroup):
    """A group of verbs, with the same help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


def _plain(params: list[Any]) -> list[Any]:
    for option in params:
        option.show_default = False  # the help texts have the defaults
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    return params


class CompletedVerb(TyperCommand):
    """Stand-in for a verb while a shell completes its words."""

    def __init__(self, name: str, table: CompletionTable) -> None:
        super().__init__(name, add_help_option=False)
        self.table = table

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return args

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        name, table = str(self.name), self.table
        words = [word for word in ctx.args if word != "="]  # a word of its own in bash
        if words and f"{name} {words[0]}" in table.verbs:
            name = f"{name} {words[0]}"
        is_of_recipe = name in table.recipe_verbs
        options = {**table.verbs.get(name, {}), **(table.settings if is_of_recipe else {})}
        last = words[-1] if words else ""
        if incomplete.startswith("-"):
            found = [Completion(option, text) for option, (text, _) in options.items()]
        elif last in ("-h", "--help"):
            found = [Completion(*pair) for pair in table.sections.items() if is_of_recipe]
        elif (values := options.get(last, ("", None))[1]) is not None:
            found = [Completion(value) for value in values]
        elif inside := [verb for verb in table.verbs if verb.startswith(f"{name} ")]:
            found = [Completion(verb.rpartition(" ")[2]) for verb in inside]
        else:
            found = list(recipes(incomplete)) if is_of_recipe else []
            if is_of_recipe or name == "recipes copy":
                found += map(Completion, packaged_recipes())
        # Nothing: the shell completes names of files.
        return [item for item in found if item.value.startswith(incomplete)]


def recipes(incomplete: str) -> Iterator[Completion]:
    """Yield the recipes that `incomplete` may become, and the folders that may have one.

    The only folder is opened, as the shell would end the word after it.
    """
    above, slash, start = incomplete.rpartition("/")
    folder = Path(os.path.expanduser(above + slash))
    if not folder.is_dir():
        return
    found = [
        Completion(f"{above}{slash}{path.name}{'/' * path.is_dir()}")
        for path in sorted(folder.iterdir())
        if path.name.startswith(start)
        and (start or not path.name.startswith("."))
        and (path.is_dir() or path.suffix == ".toml")
    ]
    if len(found) == 1 and found[0].value.endswith("/"):
        found = list(recipes(found[0].value)) or found
    yield from found


def cached_table(build: Callable[[], CompletionTable]) -> CompletionTable:
    """Read the table from the cache; build and keep it if the package has changed."""
    times = [file.stat().st_mtime_ns for file in PACKAGE.rglob("*.py")]
    key = [str(PACKAGE), len(times), max(times)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchtitan"
    file = cache / f"completion-{hashlib.sha256(str(PACKAGE).encode()).hexdigest()[:8]}.json"
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["key"] == key:
            return CompletionTable(**kept["table"])
    table = build()
    with contextlib.suppress(OSError):  # of a read-only home
        cache.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"key": key, "table": table._asdict()}), encoding="utf-8")
        new.replace(file)
    return table
