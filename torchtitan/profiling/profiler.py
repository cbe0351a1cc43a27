"""Traces and memory snapshots of all ranks, as one context manager around training.

A trace is a Chrome trace (open it at https://ui.perfetto.dev); a memory snapshot is the history of
CUDA's allocator (open it at https://pytorch.org/memory_viz). Both are written on the schedule of
`[profiling]`, and on request during a run: by a file in its dump folder, as `torchtitan profile`
does, or by SIGPROF to any rank. All ranks receive the request of one rank with the status of the
step; so all of them trace the same steps.

The exception that ends training always propagates to the caller; if memory ran out, a report of its
use is written first.
"""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Self

import torch

from torchtitan.device import Device
from torchtitan.logging import logger
from torchtitan.profiling.out_of_memory import Evidence, is_out_of_memory
from torchtitan.profiling.settings import ProfilingConfig
from torchtitan.timeline import Timeline
from torchtitan.torch_private.runtime import dump_memory, record_memory

REQUEST_FILE: Final = "profile_request.json"
"""File in job.dump_folder with a request such as {"steps": 2}."""
REQUEST_SIGNAL: Final = signal.SIGPROF
ON_REQUEST: Final = "_on_request"
"""Suffix of the folder of a trace that was requested."""

# Allocations and frees remembered for a snapshot; torch keeps the newest.
MEMORY_EVENTS = 100_000
# Seconds between two looks for a request: a network file system is slow to say that there is none.
POLL_INTERVAL = 1.0
# Steps that the profiler runs before a trace that was asked for, since its first one is slow.
WARMUP = 1


class Profiler:
    """Wrap training in it, and call `step` after every optimizer step.

    Writes `<traces folder>/iteration_<step>/rank<r>_trace.json` and
    `<snapshot folder>/iteration_<step>/rank<r>_memory_snapshot.pickle`, where step is the last one
    in it; the folder's name then ends in `_on_request` where they were asked for, and with
    `_out_of_memory` where memory ran out.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        dump_folder: Path,
        rank: int,
        device: Device,
        timeline: Timeline | None = None,
        evidence: Evidence | None = None,
        clock: Callable[[], float] = time.monotonic,
        at_request: Callable[[], None] = lambda: None,
    ) -> None:
        """`at_request` is called on all ranks when a trace was requested."""
        self.config, self.folder, self.rank, self.device = config, dump_folder, rank, device
        self.timeline = timeline or Timeline(device)
        self.evidence = evidence or Evidence(device, timeline)
        self.clock, self.at_request = clock, at_request
        self._step = self._steps = 0
        self._requested = self._asked = 0
        self._is_signaled = False
        self._looked = -POLL_INTERVAL
        self._trace: Trace | None = None
        self._handler: Any = None
        if rank == 0:
            # A request to an earlier run in this folder; one to this run may come from now on.
            (dump_folder / REQUEST_FILE).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        if self.config.enable_memory_snapshot:
            record_memory(MEMORY_EVENTS)
        self._handler = signal.signal(REQUEST_SIGNAL, self._request_one)
        self._begin_if_due()
        return self

    def request(self) -> int:
        """The number of steps that a file asks for; 0: none, or another rank reads it."""
        if self.rank == 0 and self.clock() - self._looked >= POLL_INTERVAL:
            self._looked = self.clock()
            self._requested = max(self._requested, self._take_request())
        return self._requested

    def agree(self, steps: float) -> None:
        """Trace a number of steps on every rank, as soon as no other trace is in progress."""
        self._asked = max(self._asked, int(steps))
        if steps:
            self._requested = 0

    def is_signaled(self) -> bool:
        """Whether this rank was asked by a signal to trace a step."""
        return self._is_signaled

    def agree_on_signals(self, ranks: float) -> None:
        """Trace a step if any rank was asked by a signal, whatever their number."""
        self.agree(ranks > 0)
        if ranks:
            self._is_signaled = False

    def step(self, step: int) -> None:
        """End training step number `step`."""
        self._step = step
        self._steps += 1
        if self._trace is not None:
            with self.timeline.pause("profiling"):
                if self._trace.step():
                    self._end()
        if self._trace is None:
            self._begin_if_due()
        if self.config.enable_memory_snapshot and step % self.config.profile_freq == 0:
            with self.timeline.pause("profiling"):
                self._snapshot(f"iteration_{step}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(REQUEST_SIGNAL, self._handler)
        try:
            if error is not None and is_out_of_memory(error):
                self.evidence.write(self.folder, self.rank, self._step + 1, error)
                if self.config.enable_memory_snapshot:
                    self._snapshot(f"iteration_{self._step + 1}_out_of_memory")
        finally:
            if self._trace is not None:
                self._end()
            if self.config.enable_memory_snapshot:
                record_memory(None)

    def _request_one(self, number: int, frame: FrameType | None) -> None:
        self._is_signaled = True

    def _take_request(self) -> int:
        path = self.folder / REQUEST_FILE
        if not path.exists():
            return 0
        try:
            steps = int(json.loads(path.read_bytes())["steps"])
        except (ValueError, KeyError, TypeError):
            logger.warning('%s: wanted {"steps": 1}; the request is ignored', path)
            steps = 0
        path.unlink()
        return max(steps, 0)

    def _begin_if_due(self) -> None:
        config = self.config
        busy = config.profiler_warmup + config.profiler_active
        if self._asked:
            self.at_request()
            self._begin(WARMUP, self._asked, ON_REQUEST)
            self._asked = 0
        elif (
            config.enable_profiling
            and self._steps % config.profile_freq == config.profile_freq - busy
        ):
            self._begin(config.profiler_warmup, config.profiler_active, "")

    def _begin(self, warmup: int, active: int, name: str) -> None:
        if name and self.rank == 0:
            first = self._step + warmup + 1
            steps = f"step {first}" if active == 1 else f"steps {first} to {first + active - 1}"
            logger.info("tracing %s, as requested", steps)
        if name and self._records_memory_on_request():
            record_memory(MEMORY_EVENTS)
        self.timeline.is_traced = True
        with self.timeline.pause("profiling"):
            self._trace = Trace(self.device, warmup, active, name)

    def _end(self) -> None:
        trace, self._trace = self._trace, None
        self.timeline.is_traced = False
        assert trace is not None
        name = f"iteration_{self._step}{trace.name}"
        trace.write(self._path(self.config.save_traces_folder, name, "trace.json"))
        if trace.name and self.device.type == "cuda":
            self._snapshot(name)
        if trace.name and self._records_memory_on_request():
            record_memory(None)

    def _records_memory_on_request(self) -> bool:
        return self.device.type == "cuda" and not self.config.enable_memory_snapshot

    def _snapshot(self, name: str) -> None:
        path = self._path(self.config.save_memory_snapshot_folder, name, "memory_snapshot.pickle")
        path.parent.mkdir(parents=True, exist_ok=True)
        dump_memory(path)
        logger.info("wrote %s", path)

    def _path(self, folder: str, name: str, file: str) -> Path:
        return self.folder / folder / name / f"rank{self.rank}_{file}"


class Trace:
    """A trace that has begun."""

    def __init__(self, device: Device, warmup: int, active: int, name: str) -> None:
        self.warmup, self.steps, self.name = warmup, warmup + active, name
        self.done = 0
        kinds = torch.profiler.ProfilerActivity
        # One profiler a trace: one that continues warns that it forgets the events of the last.
        self.profile = torch.profiler.profile(
            activities=[kinds.CPU, *([kinds.CUDA] if device.type == "cuda" else [])],
            schedule=torch.profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1),
            record_shapes=True,
            acc_events=True,  # there is one cycle, but torch 2.11 warns that it forgets others
        )
        self.profile.start()

    def step(self) -> bool:
        """Advance to the next step; return whether that was the last."""
        self.profile.step()
        self.done += 1
        return self.done == self.steps

    def write(self, path: Path) -> None:
        """End, and write what there is, if a step was traced."""
        self.profile.stop()
        if self.done <= self.warmup:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # A process that waits for the file finds all of it.
        unfinished = path.with_name(f"{path.name}.writing")
        self.profile.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
        logger.info("wrote %s", path)
