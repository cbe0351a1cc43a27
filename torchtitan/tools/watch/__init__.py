"""`torchtitan watch RUN`: what a run is doing, read from its folder, drawn anew every few seconds.

Nothing asks the run itself: it may be on another machine, as long as its folder can be read here.
So whether it is alive is judged by when its last row came, against when the next one is due.
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchtitan.tools.history import RunHistory
from torchtitan.tools.watch.view import View

__all__ = ["watch"]


def watch(folders: Sequence[Path], refresh: float = 2.0, once: bool = False) -> None:
    """Show runs until Ctrl-C; elsewhere than on a terminal, or `once`, only as they are now.

    Raises:
        ConfigError: where a folder is not that of a run.
    """
    from rich.console import Console, Group
    from rich.live import Live

    views = [View(RunHistory.open(folder)) for folder in folders]
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
