"""Whether a run can write what the recipe names."""

from collections.abc import Iterator
from pathlib import Path

from torchtitan.config import PlannedWorld, Problem
from torchtitan.job import JobConfig

FOLDERS = (
    "checkpoint.folder",
    "comm.save_traces_folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
)


def folders(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """What is written lies in the dump folder."""
    for key in FOLDERS:
        folder = Path(job.flat()[key])
        if folder.is_absolute() or ".." in folder.parts or folder == Path():
            yield Problem(key, "wanted the name of a folder inside job.dump_folder")
