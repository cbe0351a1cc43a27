"""The section `[profiling]`."""

from pydantic import Field

from torchtitan.config import Config


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
