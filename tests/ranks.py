"""Runs a function on several ranks of this machine; its processes, and ports free for them."""

import fcntl
import os
import random
import signal
import socket
import tempfile
import time
from pathlib import Path
from unittest import SkipTest

import torch

from torchtitan import local_ranks


def run_ranks(function, world, *args, device="cpu"):
    """`function(*args)` on `world` ranks with a process group; the results in rank order.

    The test is skipped where there are fewer GPUs than it wants.
    """
    if device == "cuda" and torch.cuda.device_count() < world:
        raise SkipTest(f"needs {world} GPUs")
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


def descendants(pid):
    """The processes that a process has started, and those that they have."""
    try:
        threads = [*Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # it has ended since
        return []
    children = [int(word) for thread in threads for word in _read(thread / "children")]
    return [*children, *(child for one in children for child in descendants(one))]


PORTS = range(20_000, 30_000)
"""Those of Slurm's jobs (`SLURM_PORTS`), below those that the kernel gives to whoever asks for any:
no connection takes one of them."""
_LOCKS = []


def free_port():
    """A port that no other call returns, in any test process, as long as this one lives."""
    folder = Path(tempfile.gettempdir()) / f"torchtitan-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            lock.close()
        else:
            _LOCKS.append(lock)
            return port
    raise RuntimeError("no port is free")


def _read(path):
    try:
        return path.read_text().split()
    except OSError:  # a thread that has ended since
        return []
