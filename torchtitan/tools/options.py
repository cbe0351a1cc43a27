"""Options that the verbs of the command line share, and the flags of a recipe."""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from torchtitan.config import ConfigError, allowed_names, help_sections, split_options
from torchtitan.logging import status
from torchtitan.remote import path_to_read
from torchtitan.tools.commands import (
    Command,
    VerbGroup,
    section_names,
    settings,
    show_sections,
    show_settings,
)


def readable(text: str) -> Path:
    """Return the path of an argument, which may be a repository of the Hugging Face hub."""
    try:
        return path_to_read(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


class Verb(Command):
    """A verb; an option whose metavar ends with `...` takes all the words up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        several = {
            name
            for option in self.params
            for name in option.opts
            if option.param_type_name == "option" and str(option.metavar).endswith("...")
        }
        words: list[str] = []
        option = None
        for word in args:
            if word.startswith("-"):
                option = word if word in several else None
            elif option and words[-1] != option:
                words.append(option)
            words.append(word)
        rest: list[str] = super().parse_args(ctx, words)
        return rest


class RecipeVerb(Verb):
    """A verb that takes the flags of a recipe, too, `--section.key value`: they are `ctx.args`."""

    takes_recipe = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = ["--help" if word == "-h" else word for word in args]
        if "--help" in words:
            at = words.index("--help")
            about = "".join(words[at + 1 : at + 2])
            if about and not about.startswith("-"):
                flags, is_long = words[:at] + words[at + 2 :], about == "all"
                found = help_sections(settings(), "" if is_long else about, flags)
                show_settings(found, is_long)
                ctx.exit()
            words = ["--help"]
        options = [name for option in self.params for name in option.opts]
        try:
            own, flags = split_options(words, options, section_names())
        except ConfigError as error:
            ctx.fail(str(error))
        super().parse_args(ctx, own)
        ctx.args = flags
        return flags

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[--SECTION.KEY VALUE]..."]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        show_sections()


def integer(least: int) -> Callable[[object], int]:
    """Return a parser of integers that are at least `least`."""

    def read(word: object) -> int:
        if not str(word).isdecimal() or int(str(word)) < least:
            raise typer.BadParameter(f"got {word}; wanted an integer >= {least}")
        return int(str(word))

    return read


count = integer(1)


def number(what: str, is_allowed: Callable[[float], bool]) -> Callable[[object], float]:
    """A reader of numbers that says `what` is wanted."""

    def read(word: object) -> float:
        try:
            found = float(str(word))
        except ValueError:
            found = float("nan")
        if not is_allowed(found):
            raise typer.BadParameter(f"got {word}; wanted {what}")
        return found

    return read


def separated(read: Callable[[object], Any]) -> Callable[[object], list[Any]]:
    """A reader of values with commas between them; `read` reads one."""
    return lambda words: [read(word.strip()) for word in str(words).split(",")]


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """A reader of one of `names`."""

    def read(word: str) -> str:
        if word not in names:
            raise typer.BadParameter(f"got {word}; {allowed_names(word, names)}")
        return word

    return read


def all_cores() -> int:
    """Return the number of processes that can run at the same time."""
    return len(os.sched_getaffinity(0))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int], None]]:
    """Show on a terminal that work is in progress; the value shows the number of recorded ranks."""
    with status(what) as add:
        yield lambda recorded: add(f": {recorded} recorded")


def write_output(text: str, output: Path | None) -> None:
    """Write to a new file, or to standard output.

    Raises:
        ConfigError: if the file exists.
    """
    if output is None:
        print(text, end="")
    elif output.exists():
        raise ConfigError(f"{output}: already exists; nothing was written")
    else:
        output.write_text(text, encoding="utf-8")


def verb(**settings: Any) -> typer.Typer:
    """A verb, or a group of verbs."""
    return typer.Typer(cls=VerbGroup, add_completion=False, **settings)


def Count(help: str, metavar: str = "N") -> Any:
    """An option that is an integer above 0."""
    return Text(metavar, help, parser=count)


def DeviceMemory(help: str) -> Any:
    """An option that is the memory of a device in GiB."""
    read = number("GiB, a number > 0 and <= 8192", lambda found: 0 < found <= 8192)
    return typer.Option(parser=read, metavar="GIB", help=help, show_default=False)


def Choice(names: Collection[str], help: str, *spellings: str) -> Any:
    """An option that is one of `names`."""
    return typer.Option(
        *spellings,
        parser=one_of(names),
        metavar=" | ".join(names),
        help=help,
        autocompletion=lambda: list(names),
    )


def Text(metavar: str, help: str, *spellings: str, **settings: Any) -> Any:
    """An option that is any text, or what its `parser` makes of it."""
    return typer.Option(*spellings, metavar=metavar, help=help, **settings)


def Flag(spelling: str, help: str) -> Any:
    """An option without a value."""
    return typer.Option(spelling, help=help)


Recipe = Annotated[
    str | None, typer.Argument(help="Recipe; settings may follow: --section.key VALUE.")
]
LogLevel = Annotated[
    str | None,
    Choice(
        ("debug", "info", "warning", "error"),
        "Minimum severity of messages to log (default: info).",
    ),
]
Run = Annotated[Path, typer.Argument(help="Folder of a run (job.dump_folder): outputs/x.")]
LayoutRanks = Annotated[
    int | None, Count("Number of ranks (default: the minimum that shows the layout).")
]
Shrink = Annotated[bool, Flag("--shrink", "Reduce model, batches and layout first.")]
Model = Annotated[str | None, Text("NAME", "Name of the model (default: that of the source).")]
Flavor = Annotated[str | None, Text("NAME", "Flavor of the model (default: that of the source).")]
Imports = Annotated[
    list[str] | None, Text("MODULE...", "Modules to import, which register models.")
]
Dataset = Annotated[
    str, Text("NAME", "Name of a data set of text, or a path (default: python_stdlib).")
]
DatasetPath = Annotated[str | None, Text("PATH", "File or folder of a data set that needs one.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", help="File to write (default: standard output)."
    ),
]
TokenizerPath = Annotated[
    str | None, Text("PATH", "Tokenizer, model.tokenizer_path (default: bytes).", "--tokenizer")
]
Processes = Annotated[int | None, Count("Number of processes (default: all cores).")]
