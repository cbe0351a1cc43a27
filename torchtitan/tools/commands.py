"""Commands of the command line: how their help looks, and how a shell completes their words."""

import os
import re
from collections.abc import Iterable, Mapping
from glob import escape, glob
from typing import Any, NamedTuple

from typer.core import TyperCommand, TyperGroup

from torchtitan.config import docstring, packaged_recipes

CompletionTable = Mapping[str, Mapping[str, tuple[str, list[str] | None]]]
"""Options of each verb, with their help and values; None for an option that takes no value.

A verb in a group has both names: `checkpoint ls`.
"""
OF_RECIPE = "--job.config_file"
"""An option of the verbs that take a recipe."""


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

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _escape_help([self, *self.get_params(ctx)])
        super().format_help(ctx, formatter)


class VerbGroup(TyperGroup):
    """A group of verbs, with the same help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_bare = not (args or self.invoke_without_command or ctx.resilient_parsing)
        rest: list[str] = super().parse_args(ctx, ["--help"] if is_bare else args)
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _escape_help([self, *self.get_params(ctx), *self.commands.values()])
        super().format_help(ctx, formatter)


def _plain(params: list[Any]) -> list[Any]:
    for option in params:
        option.show_default = False  # the help texts have the defaults
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    return params


def _escape_help(parts: Iterable[Any]) -> None:
    """Escape `[name]` in help texts, which typer gives to rich as markup; join the lines."""
    for part in parts:
        text = part.help or docstring(getattr(part, "callback", None))
        part.help = re.sub(r"(?<!\\)\[(?=[a-z#/@])", r"\[", re.sub(r"(?<=\S)\n(?=\S)", " ", text))


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
        words = ["", *(word for word in ctx.args if word != "=")]  # a word of its own in bash
        if f"{name} {' '.join(words[1:2])}" in table:
            name = f"{name} {words[1]}"
        options = table.get(name, {})
        values = options.get(words[-1], ("", None))[1]
        if incomplete.startswith("-"):
            found = [Completion(option, text) for option, (text, _) in options.items()]
        elif values is not None:
            found = [Completion(value) for value in values]
        elif inside := [verb for verb in table if verb.startswith(f"{name} ")]:
            found = [Completion(verb.rpartition(" ")[2]) for verb in inside]
        else:
            is_of_recipe = OF_RECIPE in options
            files = recipe_files(incomplete) if is_of_recipe else []
            packaged = packaged_recipes() if is_of_recipe or name == "recipes copy" else []
            found = [Completion(recipe) for recipe in (*files, *packaged)]
        # Nothing: the shell completes names of files.
        return [item for item in found if item.value.startswith(incomplete)]


def recipe_files(start: str) -> list[str]:
    """Return the recipes and folders whose path begins with `start`.

    If it is one folder, those inside it, as the shell would end the word after the only one.
    """
    paths = [path + "/" * os.path.isdir(path) for path in sorted(glob(f"{escape(start)}*"))]
    found = [path for path in paths if path.endswith(("/", ".toml"))]
    is_folder = len(found) == 1 and found[0].endswith("/") and found[0] != start
    return (is_folder and recipe_files(found[0])) or found
