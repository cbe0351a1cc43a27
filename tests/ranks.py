"""Runs a function on several ranks of this machine, as a test, and freezes processes."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torchtitan import local_ranks

Result = TypeVar("Result")
FAULTS = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}


def run_ranks(
    function: Callable[..., Result], world: int, *args: Any, device: str = "cpu"
) -> list[Result]:
    """`function(*args)` on `world` ranks with a process group; the results in rank order.

    No module here is compiled, so a fault in native code is in torch, Python or another package.
    Two were seen in about ten runs of all tests, each in another test, and none could be repeated.
    Such a fault is shown as a warning, with the stacks, and the ranks run once more.

    Raises:
        AssertionError: with the tracebacks of the ranks that failed.
    """
    try:
        return local_ranks.run_ranks(function, world, *args, device=device)
    except local_ranks.RanksFailed as error:
        if not FAULTS & {*error.codes}:
            raise AssertionError(str(error)) from None
        warnings.warn(f"A rank died in native code: {error}", stacklevel=2)
    try:
        return local_ranks.run_ranks(function, world, *args, device=device)
    except local_ranks.RanksFailed as error:
        raise AssertionError(str(error)) from None


def freeze(pid: int) -> None:
    """Stop a process, and return when each of its threads is stopped: one could still answer."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    while any(_state(thread) != "T" for thread in threads.iterdir()):
        time.sleep(0.01)


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
