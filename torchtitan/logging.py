"""One named logger for the whole package; entry points call `configure`, imports have no effect.

Every rank writes every line it logs, marked with its rank; the launcher chooses whose lines are
shown (`LOG_RANK` of `run_train.sh`). Lines go to whatever `sys.stderr` is at that moment, so a rich
progress bar, which takes the place of `sys.stderr` while it is alive, prints them above itself.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from threading import Event, Thread
from typing import Any, TextIO

logger = logging.getLogger("torchtitan")

TITLE = "{task.description}"
"""Column of a progress bar with what is in progress."""

QUIET_SECONDS = 30.0
"""Seconds without a line in the log after which what works shows that it is alive."""

_DIM, _RESET = "\033[2m", "\033[0m"
_COLORS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[1;31m"}


def configure(rank: int = 0, world: int = 1, color: bool = True, level: str = "info") -> None:
    """Write the log of this process to standard error: `12:34:56 [rank 3] WARNING message`.

    The rank is shown where there is more than one; colour only on a terminal, unless `color` is
    False or NO_COLOR is set (https://no-color.org). Lines below `level` are left out. A second call
    replaces the first.
    """
    open_streams()
    handler = _CurrentStderr()
    handler.setFormatter(_Formatter(f"[rank {rank}] " if world > 1 else "", color and has_color()))
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def open_streams() -> None:
    """Give this process the standard streams that it was started without, or that are None.

    What is written there is dropped. The descriptors are opened, too: otherwise the next file to be
    opened would take their number, and with it what this process, its native code and its children
    write. A character that an encoding lacks is written as an escape. Any number of calls is fine.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, as those below it are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            null = os.open(os.devnull, os.O_RDWR)  # never closed, as its stream is not either
            mode = "w" if number else "r"
            setattr(sys, name, open(null, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
        elif number and isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def use_utf8() -> None:
    """Start this program again in Python's UTF-8 mode if the locale has only ASCII.

    A recipe may name any file.
    """
    if sys.getfilesystemencoding() == "ascii" and "utf8" not in sys._xoptions:
        os.environ["PYTHONUTF8"] = "1"  # for the ranks that it starts
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def on_terminal(stream: TextIO | None = None) -> bool:
    """Whether a stream, by default standard error, is a terminal that understands control codes."""
    stream = stream or sys.stderr
    is_open = stream is not None and not getattr(stream, "closed", False)
    return is_open and stream.isatty() and os.environ.get("TERM") != "dumb"


def has_color() -> bool:
    """Whether standard error shows colors, and the user has not turned them off."""
    return on_terminal() and not os.environ.get("NO_COLOR")


def tell(*lines: str) -> None:
    """Write lines to standard error, if it still can be written to."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # a terminal that is gone, a stream that is closed
            print(*lines, sep="\n", file=sys.stderr, flush=True)


def make_console(**settings: Any) -> Any:
    """Make a console of rich that shows text as it is: brackets and colons in names are no markup.

    Every console, bar and status of the package is made in this module.
    """
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **settings)


def make_progress(*columns: Any, **settings: Any) -> Any:
    """Make a progress bar of rich; a text among `columns` is a template of the fields of a task.

    Unless it is started with `auto_refresh`, it draws only when it is updated: a thread that draws,
    or a stream of its own, would not survive the fork of processes.
    """
    from rich.progress import Progress, TextColumn

    quiet: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
    settings = {"auto_refresh": False, "console": make_console(stderr=True), **quiet, **settings}
    made = (TextColumn(each, markup=False) if isinstance(each, str) else each for each in columns)
    return Progress(*made, **settings)


@contextmanager
def progress_bar(what: str, total: float, *columns: Any) -> Iterator[Callable[..., None]]:
    """On a terminal, show a bar until the block ends.

    The yielded function draws it: `show(completed=5)`, or `show(advance=1)`.
    """
    if not on_terminal():
        yield lambda **done: None
        return
    from rich.progress import BarColumn

    with make_progress(TITLE, BarColumn(), *columns, transient=True) as bar:
        yield partial(bar.update, bar.add_task(what, total=total), refresh=True)


@contextmanager
def status(what: str) -> Iterator[Callable[[str], None]]:
    """Show that work is in progress, and for how long; the yielded function adds words.

    On a terminal this moves all the time; elsewhere there is a line in the log twice a minute.
    """
    if not on_terminal():
        with _reports(said := [what]):
            yield lambda more: said.__setitem__(0, f"{what}{more}")
        return
    from rich.progress import SpinnerColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TITLE, TimeElapsedColumn()
    lasting = {"auto_refresh": True, "redirect_stdout": True, "redirect_stderr": True}
    with make_progress(*columns, transient=True, **lasting) as bar:
        task = bar.add_task(what, total=None)
        yield lambda more: bar.update(task, description=f"{what}{more}")


@contextmanager
def _reports(said: Sequence[str]) -> Iterator[None]:
    done, start = Event(), time.monotonic()

    def report() -> None:
        while not done.wait(QUIET_SECONDS):
            logger.info("%s, for %.0f s", said[0], time.monotonic() - start)

    thread = Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


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
