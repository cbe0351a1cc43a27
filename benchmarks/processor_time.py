"""Processor time of calls, threads and processes, for overhead.py; and a meter that uses none."""

import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any


class NoMeter(nullcontext[None]):
    """In the place of a meter; does nothing."""

    events = None

    def resume(self, step: int, tokens: int) -> None:
        pass

    def end_step(self, status: Any, lr: float) -> None:
        pass


class Spent:
    """Processor and wall seconds in calls, a call within a call not counted again."""

    def __init__(self) -> None:
        self.processor, self.wall, self._is_inside = 0.0, 0.0, False

    def watch(self, owner: Any, name: str) -> None:
        """Count the calls of a method of an object from now on."""
        method = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return method(*args, **kwargs)
            self._is_inside, wall, processor = True, time.perf_counter(), time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.processor += time.thread_time() - processor
                self.wall += time.perf_counter() - wall
                self._is_inside = False

        setattr(owner, name, counted)


def processor_of_threads(threads: set[threading.Thread]) -> float:
    """Processor seconds of threads of this process (Linux)."""
    paths = [Path(f"/proc/self/task/{thread.native_id}/schedstat") for thread in threads]
    return sum(int(path.read_text().split()[0]) for path in paths if path.exists()) / 1e9


def processor_of_children() -> float:
    """Processor seconds of the processes that this one, or they, started and that live (Linux)."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        parents[int(path.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    found, ticks = {os.getpid()}, 0
    while new := {pid for pid, (parent, _) in parents.items() if parent in found} - found:
        found |= new
        ticks += sum(parents[pid][1] for pid in new)
    return ticks / os.sysconf("SC_CLK_TCK")
