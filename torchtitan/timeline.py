"""Time of this rank by phase: timestamps, each the end of one phase and the start of the next.

So the phases never overlap and never leave a gap: they add up to the elapsed time. On CUDA a
timestamp is an event in the stream, read when a report is due, so recording it waits for nothing.

A nested phase is counted separately (the forward of a stage within a pipeline's schedule). A pause
(a checkpoint, a validation) counts as a whole, whatever happens in it.

On a CPU the processor time of the thread is recorded too. A rank that waits for another uses none,
so even among ranks synchronized by collectives it shows which one has more to do.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from torch.profiler import record_function

from torchtitan.device import Device, Stamp

PHASES = ("data", "forward", "backward", "pipeline", "clip", "sync", "optimizer", "other")
"""Phases of a step:

    data       waiting for the next batch
    forward    of the model, with its collectives
    backward   the same; updates in the backward are in it
    pipeline   in a pipeline's schedule, but neither forward nor backward: waiting for neighbours
    clip       the gradient norm, over all ranks
    sync       sums over ranks of targets and loss, and the one wait for the status of the step
    optimizer  the update
    other      the rest
"""
REST = "other"
TRACED = "phase: "
"""Prefix of a phase's name in a trace of torch's profiler."""


class Spent(NamedTuple):
    """Seconds of a phase."""

    wall: float
    busy: float
    """Seconds of these in which the thread computed; on CUDA, where that is unknown, all."""


class Timeline:
    """Recorder of this rank's transitions between phases."""

    def __init__(self, device: Device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.clock = device, clock
        self._moments: list[tuple[str, Stamp, float]] = []
        self._inside = [REST]
        self._paused = False
        self.resumed = clock()
        """Time at which the last pause ended."""
        self.is_traced = False
        """Whether a profiler runs; to be changed between steps."""
        self.left_in: str | None = None
        """Innermost phase that raised an error."""
        self.begin()

    def begin(self) -> None:
        """Reset; the reported time starts now."""
        self._moments.clear()
        self._note()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as a phase; in a pause it belongs to the pause."""
        if self._paused:
            yield
            return
        self._inside.append(name)
        self._note()
        self.left_in, is_whole = None, False
        try:
            with record_function(f"{TRACED}{name}") if self.is_traced else nullcontext():
                yield
            is_whole = True
        finally:
            if not is_whole:
                self.left_in = self.left_in or name
            self._inside.pop()
            self._note()

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Count the time inside as a pause of training; a nested pause belongs to the outer one."""
        with self.phase(name):
            outer, self._paused = self._paused, True
            try:
                yield
            finally:
                self._paused, self.resumed = outer, self.clock()

    @property
    def paused_in(self) -> str | None:
        """The pause of training that this rank is in; any thread may ask."""
        return self._inside[-1] if self._paused else None

    def take(self) -> dict[str, Spent]:
        """Return the seconds by phase since the last call; waits for the device."""
        self._note()
        spent: dict[str, Spent] = {}
        for (name, begin, busy), (_, end, busy_then) in zip(
            self._moments, self._moments[1:], strict=False
        ):
            wall = self.device.seconds(begin, end)
            before = spent.get(name, Spent(0.0, 0.0))
            worked = wall if self.device.type != "cpu" else busy_then - busy
            spent[name] = Spent(before.wall + wall, before.busy + worked)
        del self._moments[:-1]
        return spent

    def _note(self) -> None:
        busy = time.thread_time() if self.device.type == "cpu" else 0.0
        self._moments.append((self._inside[-1], self.device.stamp(self.clock), busy))


def age_of_process() -> float | None:
    """Return the seconds since this process was started, if the system knows (Linux)."""
    stat, uptime = Path("/proc/self/stat"), Path("/proc/uptime")
    if not (stat.exists() and uptime.exists()):
        return None
    # Fields are counted from the name of the program, which may hold blanks; starttime is the 22nd.
    ticks = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return float(uptime.read_text(encoding="utf-8").split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
