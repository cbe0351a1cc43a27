"""Checks of the files and folders that a run writes."""

import errno
from collections.abc import Iterator
from pathlib import Path

from torchtitan.config import PlannedWorld, Problem, local_path
from torchtitan.job import JobConfig
from torchtitan.remote import is_url

FOLDERS = (
    "checkpoint.folder",
    "comm.save_traces_folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
)


def folders(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that all outputs are inside the dump folder."""
    values, dump = job.flat(), local_path(job.job.dump_folder)
    for key in FOLDERS:
        if key == "checkpoint.folder" and is_url(job.checkpoint.folder):
            continue
        folder = Path(values[key])
        if folder.is_absolute() or ".." in folder.parts or folder == Path():
            yield Problem(key, "wanted the name of a folder inside job.dump_folder")
        elif why := _refused(dump / folder):
            yield Problem(key, why, ("job.dump_folder",))
    yield from _frequent(job, dump)
    if is_url(job.job.dump_folder):
        message = "wanted a folder on a disk; only checkpoint.folder may be a URL"
        yield Problem("job.dump_folder", message)
    elif why := _refused(dump):
        yield Problem("job.dump_folder", why)


def _frequent(job: JobConfig, dump: Path) -> Iterator[Problem]:
    """Check the folder of frequent checkpoints, which may be outside the dump folder."""
    key, c = "checkpoint.frequent.folder", job.checkpoint
    folder, rare = dump / c.frequent.folder, dump / c.folder
    if not c.frequent.interval or is_url(c.frequent.folder):
        return
    if ".." in folder.relative_to(folder.anchor).parts or folder == dump:
        message = "wanted an absolute path, or the name of a folder inside job.dump_folder"
        yield Problem(key, message)
    elif not is_url(c.folder) and (
        folder == rare or {folder, rare} & {*folder.parents, *rare.parents}
    ):
        message = "wanted neither checkpoint.folder, nor a folder inside it or around it"
        yield Problem(key, message, ("checkpoint.folder",))
    elif why := _refused(folder):
        yield Problem(key, why, ("job.dump_folder",))


def _refused(path: Path) -> str | None:
    """Return the reason why the file system does not allow a name."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return "the name is too long for the file system"
    return None
