"""Commands of the command line: how their help looks."""

import re
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from torchtitan.config import docstring


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
