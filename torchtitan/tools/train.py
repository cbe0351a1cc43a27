"""Train from a recipe: in this process, or with --processes on several ranks."""

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer

from torchtitan import train as training
from torchtitan.config import ConfigError
from torchtitan.device import devices_here
from torchtitan.launch import REJOIN_MINUTES, RESTARTS, LaunchOptions, start
from torchtitan.resilience.schedulers import fill, node_range
from torchtitan.tools.options import Choice, Recipe, RecipeVerb, count, integer, number, verb

LEVELS = ("debug", "info", "warning", "error")
SAVES = f"{RESTARTS} if the recipe saves checkpoints, otherwise 0"
minutes = number("minutes, a number > 0", lambda value: 0 < value < float("inf"))
app = verb()


def nodes(word: str) -> range:
    """Parse `--nnodes`."""
    try:
        return node_range(word)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def Launched(metavar: str, help: str, parser: Callable[[str], Any] = str) -> Any:
    """An option on the ranks to start."""
    return typer.Option(metavar=metavar, help=help, parser=parser, rich_help_panel="Ranks")


@app.command(cls=RecipeVerb, help=__doc__)
def train(
    context: typer.Context,
    recipe: Recipe = None,
    log_level: Annotated[
        str | None, Choice(LEVELS, "Least severe messages to log (default: info).")
    ] = None,
    processes: Annotated[
        int | None,
        Launched("N", "Ranks to start on this node, and restart after a failure.", count),
    ] = None,
    nnodes: Annotated[
        range | None,
        Launched("N", "Number of nodes, or minimum and maximum: 1:2 (default: 1).", nodes),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, Launched("HOST:PORT", "Address on one of the nodes, the same for all.")
    ] = None,
    rdzv_id: Annotated[
        str | None,
        Launched("NAME", "Name of the run, if others share the endpoint (default: torchtitan)."),
    ] = None,
    rdzv_conf: Annotated[
        str | None, Launched("KEY=VALUE", "Rendezvous settings of torch: last_call_timeout=5.")
    ] = None,
    local_addr: Annotated[
        str | None,
        Launched("HOST", "Address of this node for the others (default: that of the route)."),
    ] = None,
    max_restarts: Annotated[
        int | None, Launched("N", f"Restarts after failures (default: {SAVES}).", integer(0))
    ] = None,
    rejoin_minutes: Annotated[
        float | None,
        Launched(
            "MINUTES",
            "Time that nodes wait for each other or for the network "
            f"(default: {REJOIN_MINUTES:g}).",
            minutes,
        ),
    ] = None,
    log_rank: Annotated[
        str | None, Launched("N", "Ranks of this node whose output is shown: 0,1 (default: 0).")
    ] = None,
) -> int:
    words = [*([recipe] if recipe else []), *context.args]
    if log_level:
        words += ["--metrics.log_level", log_level]
    names = [field.name for field in fields(LaunchOptions) if field.name != "origins"]
    own = {name: context.params[name] for name in names if context.params[name] is not None}
    if processes and "TORCHELASTIC_RUN_ID" in os.environ:
        context.fail("torchrun started this process as a rank; leave out --processes")
    try:
        options, origins = fill(own, os.environ, devices_here)
    except ConfigError as error:
        return training.refuse(error)
    if "processes" in options:
        return start(LaunchOptions(**options, origins=origins), words)
    if own:
        option = next(iter(own)).replace("_", "-")
        context.fail(f"--{option} needs the ranks of this node; add --processes N")
    return training.main(words)
