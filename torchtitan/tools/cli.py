"""The `torchtitan` command: collects the verbs.

A verb is a module, in this folder or in a wing: its docstring is the help of the verb, and `app`
its options. It is imported when it is called: `--help` and the completion of a shell read the
reference instead.
"""

import errno
import gc
import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand
from typer.main import get_command

from torchtitan import __version__
from torchtitan.config import (
    ConfigError,
    Unreachable,
    absent_wings,
    docstring,
    load_entry,
    print_error,
    print_message,
    with_wings,
)
from torchtitan.logging import configure
from torchtitan.packages import warn_of_other
from torchtitan.resilience.stop import IS_LAST
from torchtitan.tools.commands import (
    CompletedVerb,
    VerbGroup,
    completion_table,
    verb_names,
    verb_of_help,
)
from torchtitan.tools.options import RecipeVerb, Verb

VERBS: Final = {
    "Train": {"train": "train"},
    "Recipes": {
        "check": "check",
        "compare": "compare",
        "verify-parallelism": "verify",
        "verify-resume": "verify.resume",
        "migrate": "migrate",
        "recipes": "recipes",
        "doctor": "doctor",
    },
    "Runs": {"plot": "plot", "profile": "profile", "trace": "trace"},
    "Data": {"data": "data", "tokenizer": "tokenizer"},
    "Weights, checkpoints": {
        "checkpoint": "checkpoint",
        "generate": "generate",
        "evaluate": "evaluate",
    },
    "Documentation": {"help": "help"},
}
"""The module of each verb of the core, in the groups that `torchtitan --help` shows."""
ABSENT: Final = {
    "explain": "use torchtitan plan RUN for what a run measured next to its plan, and torchtitan "
    "profile RUN for where its time goes",
    "watch": "see metrics.jsonl, TensorBoard, Weights & Biases or /metrics; torchtitan plot RUN "
    "draws the loss",
    "resume": "start the run again, and it resumes: torchtitan train RECIPE",
    "run": "start a run by torchtitan train RECIPE",
    "convert": "use torchtitan checkpoint convert",
    "tokenize": "use torchtitan data tokenize",
    "data convert": "write with the library of that format; a run reads shards of each format",
    "data inspect --output": "lengths.u32 in the index of the shards has the lengths of documents",
    "compare --seeds": "vary the seed of a recipe by --vary debug.seed=0,1,2, that of a study by "
    "--debug.seed 1 --output FOLDER",
    "compare --launcher": "start runs over several machines yourself, and give compare their "
    "folders",
    "generate --tensor-parallel": "a model is read on one rank",
    **dict.fromkeys(
        (f"evaluate --{option}" for option in ("tensor-parallel", "num-fewshot", "include-path")),
        "for benchmarks, export the weights and run lm_eval --model hf",
    ),
}
"""Advice on verbs and options that do not exist: those of earlier versions, and those that users
expect."""


@cache
def verbs() -> dict[str, dict[str, str]]:
    """Return the module of each verb, those of the wings included, in groups."""
    found = {}
    for group, own in VERBS.items():
        modules = {name: f"torchtitan.tools.{module}" for name, module in own.items()}
        places = with_wings(f"verb.{group}", modules)
        found[group] = {name: place.partition(":")[0] for name, place in places.items()}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit status."""
    return run(argv) if argv is not None else act(sys.argv[1:])


def act(argv: Sequence[str]) -> int:
    """Run a verb as the last act of this process; returns the exit status."""
    token = IS_LAST.set(True)
    try:
        status = run(argv)
        sys.stdout.flush()
        return status
    except OSError as error:
        what = "standard output" if drop_output() else "a file"
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT) and argv[:1] != ["train"]
        if what == "a file" and not is_full:
            raise
        if not isinstance(error, BrokenPipeError):  # `| head` has read enough
            print_error(f"{what} cannot be written: {error.strerror}")
        return 1
    finally:
        IS_LAST.reset(token)


def drop_output() -> bool:
    """Drop what is written to standard output from now on, if it takes no more; else False."""
    output = sys.stdout
    try:
        output.flush()  # what could not be written is still in its buffer
        os.write(output.fileno(), b"")  # without a buffer: a full device refuses even nothing
        poll = select.poll()
        poll.register(output, 0)  # for errors alone: nobody reads the pipe
        is_taken = not poll.poll(0)
    except OSError:
        is_taken = False
    if not is_taken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    return not is_taken


def run(argv: Sequence[str]) -> int:
    """Run a verb in a process that may continue; returns the exit status."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m` has it: job.imports may name modules there
    configure()
    status = call(list(argv))
    # Of the ranks that torchrun started, the first reports a refusal.
    if status == 2 and os.environ.get("RANK", "0") == "0" and (absent := absent_wings()):
        print_message("note", absent)  # it may be a name or a key of theirs
    return status


def call(words: list[str]) -> int:
    """Call the verb that `words` name, and print why it refuses them; returns the exit status."""
    try:
        status: int | None = get_command(app).main(words, "torchtitan", standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "torchtitan"
        message = error.format_message()
        if isinstance(error, typer.BadParameter) and error.message:
            message = f"{error.param.opts[-1]}: {error.message}" if error.param else error.message
        print_error(f"{message}; see {where} --help")
        return 2
    except ConfigError as error:
        print_error(error)
        return 2
    except Unreachable as error:
        print_error(error)
        return 1
    except OSError as error:
        if words[:1] == ["train"] or not error.filename:  # a run may start again
            raise
        print_error(f"{error.filename}: {error.strerror}")
        return 2
    return status or 0


class Verbs(VerbGroup):
    """All verbs; each is imported when it is called, and listed by its docstring until then."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {
            name: TyperCommand(name, help=summary(module), rich_help_panel=group)
            for group, modules in verbs().items()
            for name, module in modules.items()
        }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `--help NAME` as the help of a verb, or of a section of a recipe."""
        if args[:1] in (["--help"], ["-h"]):
            if ctx.resilient_parsing:  # a shell completes the name
                args = ["train", *args]
            elif len(args) > 1:
                name = args[1]
                args = [name, "--help"] if name in self.commands else ["train", "--help", name]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The verb that `args` begin with, and what follows it."""
        if not ctx.resilient_parsing:  # a shell completes the words
            refuse_absent(args)
            if args[0] not in self.commands and args[0] in verb_names():
                raise ConfigError(f"there is no `torchtitan {args[0]}` without its package")
        name, listed, rest = super().resolve_command(ctx, args)
        if name is None or listed is None:
            return name, listed, rest
        if name != "train" and not ctx.resilient_parsing:  # `train` warns on rank 0
            warn_of_other()
        modules = {verb: module for each in verbs().values() for verb, module in each.items()}
        if ctx.resilient_parsing:  # a shell completes the words
            return name, CompletedVerb(name, completion_table()), rest
        if {"--help", "-h"} & {*rest}:
            return name, verb_of_help(name, (Verb, RecipeVerb)), rest
        return name, command(modules[name]), rest


def refuse_absent(args: Sequence[str]) -> None:
    """Refuse what `ABSENT` lists, with its advice."""
    words = [word.partition("=")[0] for word in args]
    for absent, advice in ABSENT.items():
        *verb, last = absent.split()
        depth = len(verb)
        found = words[depth:] if last.startswith("--") else words[depth : depth + 1]
        if words[:depth] == verb and last in found:
            raise ConfigError(f"there is no `torchtitan {absent}`; {advice}")


@contextmanager
def imported_for_good() -> Iterator[None]:
    """Collect no garbage while modules are imported, which would take a fifth of the time.

    Nor is it looked for later among what a process has imported whose last act this is.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if IS_LAST.get():
            gc.freeze()
        if collects:
            gc.enable()


def command(module: str) -> Any:
    """Import the command of a verb."""
    with imported_for_good():
        verb = get_command(load_entry(f"{module}:app"))
    verb.help = verb.help or docstring(import_module(module))
    return verb


def summary(module: str) -> str:
    """The first line of the docstring of a module, without importing it."""
    path = Path(__file__).parents[2].joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    with file.open(encoding="utf-8") as text:
        return text.readline().strip('"\n')


app = typer.Typer()


def show_version(is_asked: bool) -> None:
    """Print the versions that a report of a mistake should have, and exit."""
    if is_asked:
        python = sys.version.split()[0]
        print(f"torchtitan {__version__}, torch {version('torch')}, Python {python}")
        raise typer.Exit


@app.callback(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
def torchtitan(
    is_asked: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=show_version, is_eager=True, help="Show versions and exit."
        ),
    ] = False,
) -> None:
    """Train language and vision models from a recipe; inspect recipes, runs and weights."""


if __name__ == "__main__":
    sys.exit(main())
