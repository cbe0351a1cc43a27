"""Options on the ranks to start, for the verbs that start them on every node."""

from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer

from torchtitan.cluster.launcher import REJOIN_MINUTES, LaunchOptions
from torchtitan.cluster.schedulers import node_range
from torchtitan.tools.options import count, number

minutes = number("minutes, a number > 0", lambda value: 0 < value < float("inf"))


def nodes(word: str) -> range:
    """Parse `--nnodes`."""
    try:
        return node_range(word)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def RankOption(metavar: str, help: str, parser: Callable[[str], Any] = str) -> Any:
    """An option on the ranks to start."""
    return typer.Option(metavar=metavar, help=help, parser=parser, rich_help_panel="Ranks")


Processes = Annotated[int | None, RankOption("N", "Ranks to start on this node.", count)]
Nodes = Annotated[
    range | None,
    RankOption("N", "Number of nodes, or minimum and maximum: 1:2 (default: 1).", nodes),
]
Endpoint = Annotated[
    str | None, RankOption("HOST:PORT", "Address on one of the nodes, the same for all.")
]
RunName = Annotated[
    str | None,
    RankOption("NAME", "Name of the run, if others share the endpoint (default: torchtitan)."),
]
RendezvousSettings = Annotated[
    str | None, RankOption("KEY=VALUE", "Rendezvous settings of torch: last_call_timeout=5.")
]
LocalAddress = Annotated[
    str | None,
    RankOption("HOST", "Address of this node for the others (default: that of the route)."),
]
Patience = Annotated[
    float | None,
    RankOption(
        "MINUTES",
        f"Time that nodes wait for each other or for the network (default: {REJOIN_MINUTES:g}).",
        minutes,
    ),
]


def given(context: typer.Context) -> dict[str, Any]:
    """Return the options of `LaunchOptions` that the command line has."""
    names = [field.name for field in fields(LaunchOptions)]
    return {name: context.params[name] for name in names if context.params.get(name) is not None}
