"""Train a recipe in this process, or on several ranks with --processes."""

from collections.abc import Callable

import typer

from torchtitan import trainer
from torchtitan.config import Registry
from torchtitan.tools.options import LogLevel, Recipe, RecipeVerb, verb

LAUNCHERS = Registry[Callable[..., int]]("launcher")
"""Its entry `train` is this verb with options on the ranks to start, and replaces the one here."""

app = verb()


def train(context: typer.Context, recipe: Recipe = None, log_level: LogLevel = None) -> int:
    """Train in this process, which may be one of several that torchrun has started."""
    words = [*([recipe] if recipe else []), *context.args]
    if log_level:
        words += ["--metrics.log_level", log_level]
    return trainer.main(words)


app.command("train", cls=RecipeVerb, help=__doc__)(LAUNCHERS.get("train", train))
