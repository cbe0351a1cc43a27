"""Checks of the files that a run writes: that it can be resumed, restarted and rolled back."""

import errno
from collections.abc import Iterator
from pathlib import Path

from torchtitan.config import PlannedWorld, Problem, local_path, show
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
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


def formats(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the model supports the export formats."""
    spec = MODELS[job.model.name]
    if job.checkpoint.last_save_in_hf and "hf" not in spec.formats:
        message = f"the spec of {spec.name} does not define this format of its weights; use false"
        yield Problem("checkpoint.last_save_in_hf", message, ("model.name",))


def skipped(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the number of samples to skip is known."""
    if job.data.skip_samples == -1 and job.checkpoint.initial_load_path is None:
        message = (
            "it takes the number from checkpoint.initial_load_path, which is absent; wanted a "
            "number of samples"
        )
        yield Problem("data.skip_samples", message, ("checkpoint.initial_load_path",))


def restarts(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Find settings that keep a restarted run from resuming."""
    c = job.checkpoint
    wrong = {
        # The other groups still have the state of a lost replica group.
        "enable": (not c.enable and not job.fault_tolerance.enable, True),
        "load_only": (c.load_only, False),
        "load_step": (c.load_step >= 0, -1),
        "resume": (c.resume == "never", "auto"),
    }
    for key, (is_wrong, right) in wrong.items():
        if world.may_restart and is_wrong:
            message = f"a restart continues from the newest checkpoint; use {show(right)}"
            yield Problem(f"checkpoint.{key}", message)


ROLLBACKS = "spikes.max_rollbacks"


def rollbacks(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that there can be a checkpoint from before the first skipped step to return to."""
    if not job.spikes.max_rollbacks:
        return
    c, row = job.checkpoint, job.training.max_skipped_steps
    needed = 1 + -(-row // c.interval)
    if not c.enable or c.load_only:
        message = "rolling back needs checkpoints: checkpoint.enable = true, load_only = false"
        yield Problem(ROLLBACKS, message, ("checkpoint",))
    elif 0 < c.keep_latest_k < needed:
        message = (
            f"the checkpoint before {row} skipped steps in a row (training.max_skipped_steps) "
            f"would be deleted before the rollback; use checkpoint.keep_latest_k >= {needed}, "
            "or 0"
        )
        yield Problem(ROLLBACKS, message, ("checkpoint", "training"))
    if job.fault_tolerance.enable:
        message = "replica groups have separate checkpoints, and cannot roll back; use 0"
        yield Problem(ROLLBACKS, message, ("fault_tolerance.enable",))


def spikes(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the window of spike detection fills within the run."""
    window, steps = job.spikes.window, job.training.steps
    if job.spikes.sigma and window >= steps:
        message = (
            f"it is full only after {window} good steps, and there are {steps}; only "
            "non-finite steps are skipped"
        )
        yield Problem("spikes.window", message, ("training.steps",), "note")
