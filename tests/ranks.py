"""Runs a function on several ranks of this machine, as a test, and freezes processes."""

import os
import signal
import time
from pathlib import Path
from typing import TypeVar

from torchtitan import local_ranks

Result = TypeVar("Result")


def run_ranks(function, world, *args, device="cpu"):
    """`function(*args)` on `world` ranks with a process group; the results in rank order."""
    try:
        return local_ranks.run_ranks(function, world, *args, device=device)
    except local_ranks.RanksFailed as error:
        raise AssertionError(str(error)) from None


def freeze(pid):
    """Stop a process, and return when each of its threads is stopped: one could still answer."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    while any(_state(thread) != "T" for thread in threads.iterdir()):
        time.sleep(0.01)


def _state(thread):
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
