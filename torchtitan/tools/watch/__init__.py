"""Show the progress of runs, redrawn every few seconds until Ctrl-C.

The run itself is not asked: it may be on another machine, as long as its folder can be read here.
So whether it is alive is judged by when its last row came, and when the next one is due.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from torchtitan.tools.history import RunHistory
from torchtitan.tools.options import Verb, number, verb
from torchtitan.tools.watch.view import View

SECONDS = number("seconds, above 0 and at most 3600", lambda seconds: 0 < seconds <= 3600)
app = verb()


@app.command(cls=Verb, help=__doc__)
def watch(
    runs: Annotated[
        list[Path], typer.Argument(help="Folder of a run (job.dump_folder): outputs/x.")
    ],
    refresh: Annotated[
        float,
        typer.Option(
            parser=SECONDS, metavar="SECONDS", help="Time between two redraws (default: 2)."
        ),
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    views = [View(RunHistory.open(folder)) for folder in runs]
    on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    console = Console(width=None if on_terminal else 100, highlight=False)
    if once or not on_terminal:
        console.print(*views, sep="\n")
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(Group(*views), refresh=True)
            time.sleep(refresh)
            for view in views:
                view.update()
