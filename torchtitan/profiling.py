"""Traces of where the time goes and snapshots of where the memory goes, as one context manager.

A trace is a Chrome trace of `profiler_active` steps in every `profile_freq` (open it at
https://ui.perfetto.dev); a memory snapshot is the allocator's history of the last
`profile_freq` steps (open it at https://pytorch.org/memory_viz), and, when the device runs out of
memory, the evidence of why. The exception itself always goes on to the caller.
"""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from pydantic import Field

from torchtitan import torch_private
from torchtitan.config import Config
from torchtitan.device import Device
from torchtitan.logging import logger

# Allocations and frees remembered for a snapshot; torch keeps the newest.
MEMORY_EVENTS = 100_000


class ProfilingConfig(Config):
    """`[profiling]`: what to look at while training; both slow it down."""

    enable_profiling: bool = Field(False, description="Write Chrome traces.")
    save_traces_folder: str = Field(
        "profile_traces", description="Folder of the traces, inside job.dump_folder."
    )
    profile_freq: int = Field(
        10, ge=1, description="Write a trace, and a memory snapshot, every this many steps."
    )
    profiler_active: int = Field(1, ge=1, description="Steps in a trace.")
    profiler_warmup: int = Field(
        3, ge=0, description="Steps the profiler runs before a trace without keeping anything."
    )
    enable_memory_snapshot: bool = Field(
        False, description="Write memory snapshots, also when out of memory (CUDA only)."
    )
    save_memory_snapshot_folder: str = Field(
        "memory_snapshot", description="Folder of the memory snapshots, inside job.dump_folder."
    )


def check_profiling(config: ProfilingConfig, device_type: str) -> list[tuple[str, str]]:
    """(key, message) for each setting that cannot work together with the others or the device."""
    problems = []
    busy = config.profiler_warmup + config.profiler_active
    if config.enable_profiling and busy > config.profile_freq:
        problems.append(
            (
                "profiling.profile_freq",
                f"these are too few steps for profiler_warmup = "
                f"{config.profiler_warmup} plus profiler_active = {config.profiler_active}; "
                f"use at least {busy}",
            )
        )
    if config.enable_memory_snapshot and device_type != "cuda":
        problems.append(
            (
                "profiling.enable_memory_snapshot",
                f"torch keeps a history of allocations on CUDA only, and this runs on "
                f"{device_type}; set it to false (a trace of enable_profiling works here)",
            )
        )
    return problems


class Profiler:
    """Wrap training in it and call `step` after every optimizer step; does nothing when all is off.

    Writes `<traces folder>/iteration_<step>/rank<r>_trace.json` and
    `<snapshot folder>/iteration_<step>/rank<r>_memory_snapshot.pickle`, where step is the last one
    in it; the folder of a snapshot taken when out of memory ends in `_out_of_memory`.
    """

    def __init__(
        self, config: ProfilingConfig, dump_folder: Path, rank: int, device: Device
    ) -> None:
        self.config, self.folder, self.rank, self.device = config, dump_folder, rank, device
        self._step = self._traced = self._steps = 0
        self._trace: torch.profiler.profile | None = None

    def __enter__(self) -> Self:
        if self.config.enable_memory_snapshot:
            torch_private.record_memory(MEMORY_EVENTS)
        if self.config.enable_profiling:
            self._begin_trace()
        return self

    def step(self, step: int) -> None:
        """End training step number `step`."""
        self._step = step
        self._steps += 1
        if self._trace is not None:
            self._trace.step()
            if self._steps % self.config.profile_freq == 0:
                self._trace.stop()
                self._begin_trace()
        if self.config.enable_memory_snapshot and step % self.config.profile_freq == 0:
            self._snapshot(f"iteration_{step}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.config.enable_memory_snapshot and isinstance(error, torch.OutOfMemoryError):
                self._snapshot(f"iteration_{self._step + 1}_out_of_memory")
        finally:
            if self._trace is not None:
                self._trace.stop()
            if self.config.enable_memory_snapshot:
                torch_private.record_memory(None)

    def _begin_trace(self) -> None:
        # One profiler a trace: one that goes on warns that it forgets the events of the last.
        from torch.profiler import ProfilerActivity

        config = self.config
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._trace = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=config.profile_freq - config.profiler_warmup - config.profiler_active,
                warmup=config.profiler_warmup,
                active=config.profiler_active,
                repeat=1,
            ),
            on_trace_ready=self._export,
            record_shapes=True,
            acc_events=True,  # there is one cycle, but torch 2.11 warns that it forgets others
        )
        self._trace.start()

    def _export(self, profile: Any) -> None:
        # Stopping may end a trace that began after the last step and so holds none.
        if self._traced == self._step:
            return
        self._traced = self._step
        path = self._path(self.config.save_traces_folder, f"iteration_{self._step}", "trace.json")
        profile.export_chrome_trace(str(path))
        logger.info("wrote %s", path)

    def _snapshot(self, name: str) -> None:
        path = self._path(self.config.save_memory_snapshot_folder, name, "memory_snapshot.pickle")
        torch_private.dump_memory(path)
        logger.info("wrote %s", path)

    def _path(self, folder: str, name: str, file: str) -> Path:
        parent = self.folder / folder / name
        parent.mkdir(parents=True, exist_ok=True)
        return parent / f"rank{self.rank}_{file}"
