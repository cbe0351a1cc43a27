"""The section `[profiling]`."""

from collections.abc import Iterator

from pydantic import Field

from torchtitan.config import Config, Context, Problem


class ProfilingConfig(Config):
    """Traces and memory snapshots during training; both slow it down."""

    enable_profiling: bool = Field(False, description="Write Chrome traces.")
    save_traces_folder: str = Field(
        "profile_traces", description="Folder of the traces, inside job.dump_folder."
    )
    profile_freq: int = Field(
        10, ge=1, description="Steps between traces, and between memory snapshots."
    )
    profiler_active: int = Field(1, ge=1, description="Number of steps in a trace.")
    profiler_warmup: int = Field(
        3, ge=0, description="Steps that the profiler runs before a trace without recording."
    )
    enable_memory_snapshot: bool = Field(
        False, description="Write memory snapshots, also on running out of memory (CUDA only)."
    )
    save_memory_snapshot_folder: str = Field(
        "memory_snapshot", description="Folder of the memory snapshots, inside job.dump_folder."
    )

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
