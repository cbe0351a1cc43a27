"""One named logger for the whole package; entry points call `configure`, imports have no effect.

Every rank writes every line it logs, marked with its rank; the launcher chooses whose lines are
shown (`LOG_RANK` of `run_train.sh`). Lines go to whatever `sys.stderr` is at that moment, so a rich
progress bar, which takes the place of `sys.stderr` while it is alive, prints them above itself.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TextIO

logger = logging.getLogger("torchtitan")

_DIM, _RESET = "\033[2m", "\033[0m"
_COLORS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[1;31m"}


def configure(rank: int = 0, world: int = 1, color: bool = True, level: str = "info") -> None:
    """Write the log of this process to standard error: `12:34:56 [rank 3] WARNING message`.

    The rank is shown where there is more than one; colour only on a terminal, unless `color` is
    False or NO_COLOR is set (https://no-color.org). Lines below `level` are left out. A second call
    replaces the first.
    """
    handler = _CurrentStderr()
    handler.setFormatter(_Formatter(f"[rank {rank}] " if world > 1 else "", color and has_color()))
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def on_terminal() -> bool:
    """Whether standard error is a terminal that understands control codes."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def has_color() -> bool:
    """Whether standard error shows colors, and the user has not turned them off."""
    return on_terminal() and not os.environ.get("NO_COLOR")


def make_progress(*columns: Any, **settings: Any) -> Any:
    """Make a progress bar of rich that draws only when it is updated.

    A thread that draws, or a stream of its own, would not survive the fork of processes.
    """
    from rich.console import Console
    from rich.progress import Progress

    quiet: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
    console = Console(stderr=True)
    return Progress(*columns, console=console, auto_refresh=False, **quiet, **settings)


@contextmanager
def progress_bar(what: str, total: float, *columns: Any) -> Iterator[Callable[..., None]]:
    """On a terminal, show a bar until the block ends.

    The yielded function draws it: `show(completed=5)`, or `show(advance=1)`.
    """
    if not on_terminal():
        yield lambda **done: None
        return
    with make_progress(*columns, transient=True) as bar:
        yield partial(bar.update, bar.add_task(what, total=total), refresh=True)


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Stream handler that looks up `sys.stderr` for every line instead of once."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _stream: TextIO) -> None:
        raise AttributeError("this handler always writes to the current sys.stderr")


class _Formatter(logging.Formatter):
    def __init__(self, prefix: str, color: bool) -> None:
        super().__init__()
        self.prefix, self.color = prefix, color

    def format(self, record: logging.LogRecord) -> str:
        time = self.formatTime(record, "%H:%M:%S")
        level = f"{record.levelname} " if record.levelno != logging.INFO else ""
        # The base class with its default format adds the traceback, if any, to the message.
        message = super().format(record)
        if not self.color:
            return f"{time} {self.prefix}{level}{message}"
        tint = _COLORS.get(record.levelno, "")
        return f"{_DIM}{time} {self.prefix}{_RESET}{tint}{level}{message}{_RESET if tint else ''}"
