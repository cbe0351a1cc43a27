"""The section `[profiling]`."""

from collections.abc import Iterator

from pydantic import Field

from torchtitan.config import Config, Context, Problem


class ProfilingConfig(Config):
    """Traces and memory snapshots during training; both slow it down."""

    enable_profiling: bool = False
    """Write Chrome traces."""
    save_traces_folder: str = "profile_traces"
    """Folder of the traces, inside job.dump_folder."""
    profile_freq: int = Field(10, ge=1)
    """Steps between traces, and between memory snapshots."""
    profiler_active: int = Field(1, ge=1)
    """Number of steps in a trace."""
    profiler_warmup: int = Field(3, ge=0)
    """Steps that the profiler runs before a trace without recording."""
    enable_memory_snapshot: bool = False
    """Write memory snapshots, also on running out of memory (CUDA only)."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the memory snapshots, inside job.dump_folder."""

    def problems(self, context: Context) -> Iterator[Problem]:
        busy = self.profiler_warmup + self.profiler_active
        if self.enable_profiling and busy > self.profile_freq:
            message = (
                f"too few steps for profiler_warmup = {self.profiler_warmup} plus "
                f"profiler_active = {self.profiler_active}; use at least {busy}"
            )
            yield Problem("profile_freq", message, ("profiler_warmup", "profiler_active"))
        if self.enable_memory_snapshot and context.world.device_type != "cuda":
            message = (
                "torch records allocations on CUDA only, but this run is on "
                f"{context.world.device_type}; set it to false (enable_profiling works here)"
            )
            yield Problem("enable_memory_snapshot", message)
