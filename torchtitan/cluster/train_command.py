"""The options of `torchtitan train` on the ranks to start."""

import os
from typing import Annotated

import typer

from torchtitan import train as training
from torchtitan.cluster import launch_options as launched
from torchtitan.cluster.launcher import RESTARTS, LaunchOptions, start
from torchtitan.cluster.schedulers import fill
from torchtitan.config import ConfigError
from torchtitan.device import devices_here
from torchtitan.tools.options import LogLevel, Recipe, integer

SAVES = f"{RESTARTS} if the recipe saves checkpoints, otherwise 0"


def train(
    context: typer.Context,
    recipe: Recipe = None,
    log_level: LogLevel = None,
    processes: launched.Processes = None,
    nnodes: launched.Nodes = None,
    rdzv_endpoint: launched.Endpoint = None,
    rdzv_id: launched.RunName = None,
    rdzv_conf: launched.RendezvousSettings = None,
    local_addr: launched.LocalAddress = None,
    max_restarts: Annotated[
        int | None,
        launched.RankOption("N", f"Restarts after failures (default: {SAVES}).", integer(0)),
    ] = None,
    rejoin_minutes: launched.Patience = None,
    log_rank: Annotated[
        str | None,
        launched.RankOption("N", "Ranks of this node whose output is shown: 0,1 (default: 0)."),
    ] = None,
) -> int:
    """Train in this process; or on several ranks of this node, if their number is known."""
    words = [*([recipe] if recipe else []), *context.args]
    if log_level:
        words += ["--metrics.log_level", log_level]
    own = launched.given(context)
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
