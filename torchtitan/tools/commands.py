"""Commands of the command line: how their help looks, and how a shell completes their words.

Verbs import torch, which takes longer than help may. So what their options are, and the settings of
recipes, is kept in `reference.json`, which scripts/write_config_docs.py writes from the code.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from glob import escape, glob
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from torchtitan.config import HelpEntry, HelpSection, docstring, packaged_recipes, sections
from torchtitan.logging import make_console

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


REFERENCE = Path(__file__).with_name("reference.json")
TYPES = {"str": str, "bool": bool, "int": int, "float": float, "Path": Path}
TYPES |= {f"list[{name}]": list[kind] for name, kind in TYPES.items()}  # type: ignore[valid-type]
SETTINGS = """\
Settings override the recipe: --section.key VALUE, or --section.key=VALUE.
True, false: --section.key, --no-section.key. None: --section.key none.
Lists: --section.key A B, or A,B, or a JSON array: '["A, with a comma", "B"]'.
For the settings of a section: --help SECTION; for those of every section: --help all.
"""


def as_json(verbs: Mapping[str, Any], settings: Iterable[HelpSection]) -> str:
    """Return the text of `reference.json`, for the commands of all verbs and the whole recipe."""
    lines = ",\n".join(json.dumps([name, _described(verb)]) for name, verb in verbs.items())
    parts = ",\n".join(map(json.dumps, settings))
    return f'{{"verbs": [\n{lines}\n], "settings": [\n{parts}\n]}}\n'


def _described(verb: Any) -> dict[str, Any]:
    """Describe a command by what its help and completion show."""
    context, options = verb.context_class(verb), []
    for option in verb.get_params(context):
        if option.name == "help":
            continue
        kind, is_option = option.type_descriptor.annotation, option.param_type_name == "option"
        options.append(
            {
                "name": option.name,
                "words": option.opts if is_option else [],
                "off": option.secondary_opts,
                # Another type is that of a parser, which does not appear in help.
                "type": next((name for name, each in TYPES.items() if each == kind), "str"),
                "is_parsed": not is_option and not option.type_descriptor.is_path,
                "metavar": option.metavar,
                "help": option.help,
                "panel": option.rich_help_panel,
                "required": option.required,
                "values": [item.value for item in option.shell_complete(context, "")],
            }
        )
    return {
        "help": verb.help,
        "takes_recipe": getattr(verb, "takes_recipe", False),
        "options": options,
        "verbs": {name: _described(each) for name, each in getattr(verb, "commands", {}).items()},
    }


@cache
def _reference() -> Any:
    return json.loads(REFERENCE.read_text(encoding="utf-8"))


@cache
def settings() -> list[HelpSection]:
    """Return all sections of a recipe, as they come with the package."""
    return [
        HelpSection._make([*rest, [HelpEntry(*entry) for entry in entries]])
        for *rest, entries in _reference()["settings"]
    ]


def verb_names() -> list[str]:
    """Return the names of all verbs, as they come with the package."""
    return [name for name, _ in _reference()["verbs"]]


def section_names() -> dict[str, None]:
    """Return the names of the sections of a recipe."""
    return dict.fromkeys(section.name.partition(".")[0] for section in settings())


def verb_of_help(name: str, classes: tuple[type, type]) -> Any:
    """Return a command that has the help of a verb, and does nothing.

    Args:
        classes: class of a verb, and of one that takes a recipe.
    """
    app = typer.Typer(cls=VerbGroup, add_completion=False)
    found = dict(_reference()["verbs"])[name]
    for inner, each in found["verbs"].items():
        app.command(inner, cls=classes[each["takes_recipe"]], help=each["help"])(_stub(each))
    own = {"help": found["help"]}
    if found["verbs"]:
        app.callback(invoke_without_command=True, **own)(_stub(found))
    else:
        app.command(name, cls=classes[found["takes_recipe"]], **own)(_stub(found))
    return get_command(app)


def _stub(verb: Mapping[str, Any]) -> Any:
    """Return a function with the parameters of a verb."""

    def stub(**_: object) -> None:
        pass

    parameters = []
    for option in verb["options"]:
        about = {"metavar": option["metavar"], "help": option["help"], "show_default": False}
        about["rich_help_panel"] = option["panel"]
        words, kind = option["words"], TYPES[option["type"]]
        if option["off"]:
            words = [f"{on}/{off}" for on, off in zip(words, option["off"], strict=True)]
        parser = kind if option["is_parsed"] else None
        info = typer.Option(*words, **about) if words else typer.Argument(parser=parser, **about)
        default = Parameter.empty if option["required"] else None
        given = {"default": default, "annotation": Annotated[kind, info]}
        parameters.append(Parameter(option["name"], Parameter.KEYWORD_ONLY, **given))
    stub.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return stub


def section_lines() -> dict[str, str]:
    """Return a line about each section of a recipe; where there is a choice, its names."""
    lines: dict[str, str] = {}
    for section in sections(settings()):
        name = section.name
        if section.choice and "." not in name:
            lines[name] = ", ".join(filter(None, [lines.get(name), section.choice]))
        elif "." not in name:
            lines[name] = section.about
    return lines


def show_sections() -> None:
    """Print the list of sections, as a part of the help of a verb."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, about in section_lines().items():
        table.add_row(Text(name, style="bold cyan"), Text(about))
    _print_panels([("Settings", [Text(SETTINGS), table])])


def show_settings(found: Sequence[HelpSection], is_long: bool) -> None:
    """Print the settings of sections; long help on a terminal goes through a pager."""
    from rich.padding import Padding
    from rich.text import Text

    panels: list[tuple[str, list[Any]]] = []
    for section in found:
        rows: list[Any] = [Text(section.about)]
        for entry in section.entries:
            default = "" if "(default: " in entry.help else f"; default: {entry.default}"
            values = f"({entry.allowed}{default})"
            rows.append(Text.assemble((f"--{entry.path}", "bold cyan"), "  ", (values, "dim")))
            rows.append(Padding(Text(entry.help), (0, 0, 0, 4)))
        panels.append((section.title, rows))
    _print_panels(panels, is_long)


def _print_panels(panels: Iterable[tuple[str, Sequence[Any]]], is_long: bool = False) -> None:
    """Print frames such as those of the options of a verb."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    console = make_console()
    with console.pager() if is_long and console.is_terminal else nullcontext():
        for title, rows in panels:
            frame = Panel(Group(*rows), title=Text(title), title_align="left", border_style="dim")
            console.print(frame)


def completion_table() -> CompletionTable:
    """Return the options of all verbs and the settings of recipes, with their help and values."""
    keys: dict[str, tuple[str, list[str]]] = {}
    for entry in (entry for section in settings() for entry in section.entries):
        of_others = keys.get(f"--{entry.path}", ("", []))[1]
        keys[f"--{entry.path}"] = entry.help, list(dict.fromkeys([*of_others, *entry.values]))
    about_help = "Show this message and exit.", [*section_lines(), "all"]
    table: dict[str, Mapping[str, tuple[str, list[str] | None]]] = {}
    for path, verb in _leaves(dict(_reference()["verbs"])):
        options: dict[str, tuple[str, list[str] | None]] = {}
        for option in verb["options"]:
            values = None if option["type"] == "bool" else option["values"]
            options |= dict.fromkeys(option["words"], (option["help"], values))
        options["--help"] = about_help[0], None
        if verb["takes_recipe"]:
            options |= keys | dict.fromkeys(("-h", "--help"), about_help)
        table[path] = options
    return table


def _leaves(verbs: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the verbs that have no verbs within them, by name: `checkpoint ls`."""
    for name, verb in verbs.items():
        if verb["verbs"]:
            yield from _leaves(verb["verbs"], f"{above}{name} ")
        else:
            yield f"{above}{name}", verb
