"""Checks of a run's files, that it can resume, restart and roll back, and of its validation."""

import errno
from collections.abc import Iterator
from pathlib import Path

from torchtitan.checks.model import model_of
from torchtitan.config import PlannedWorld, Problem, RecipeError, local_path, show
from torchtitan.data import DATASETS
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.remote import is_url
from torchtitan.tasks import TASKS

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
    if why := _refused(dump):
        yield Problem("job.dump_folder", why)
        return
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
    """Check that the format of the last save can express the model, and names all weights."""
    key, spec = "checkpoint.last_save_in_hf", MODELS[job.model.name]
    if not job.checkpoint.last_save_in_hf:
        return
    if "hf" not in spec.formats:
        message = f"the spec of {spec.name} does not define this format of its weights; use false"
        yield Problem(key, message, ("model.name",))
    elif model := model_of(job):
        written = spec.formats["hf"]
        try:
            written.config(model.args, job.training.seq_len)
        except RecipeError as error:
            for line in error.lines:
                yield Problem(key, f"the format cannot express {line}", ("model",))
        for name, _ in model.empty().named_parameters():
            try:
                written.name(name)
            except KeyError:
                message = f"{spec.name} has no name for {name} in this format"
                yield Problem(key, message, ("model.name",))
                return  # others may lack theirs alike


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


EMBEDDED = "python_stdlib"
"""Data set that needs no files; with a suffix, its held-out part."""


def shapes(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the model, built for training, takes the batches of a validation."""
    v, t, p = job.validation, job.training, job.parallelism
    if not v.enable:
        return
    length, batch, longest = v.seq_len or t.seq_len, v.local_batch_size or 0, t.longest
    pipelined = p.pipeline_parallel_degree > 1
    rests_on = ("training.seq_len", "parallelism.pipeline_parallel_degree")
    if length > longest:
        message = f"the model has positions for training.seq_len = {longest} tokens; use that"
        yield Problem("validation.seq_len", message, rests_on)
    elif length < t.seq_len and pipelined:
        message = f"stages of a pipeline exchange sequences of training.seq_len = {t.seq_len}"
        yield Problem("validation.seq_len", f"{message}; use that", rests_on)
    each = p.pipeline_parallel_microbatch_size
    if pipelined and batch % each:
        message = (
            "it is not a multiple of the microbatches of a pipeline, "
            f"parallelism.pipeline_parallel_microbatch_size = {each}"
        )
        yield Problem("validation.local_batch_size", message, ("parallelism",))


def averages(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the weights have an average where it is used, and only one."""
    if job.validation.enable and job.validation.average and job.optimizer.average is None:
        message = "the run keeps no average of its weights; set optimizer.average, such as to 0.999"
        yield Problem("validation.average", message, ("optimizer.average",))
    if job.communication.replicas.runs_apart and job.optimizer.average is not None:
        message = "replicas have different weights between exchanges; leave it out"
        yield Problem("optimizer.average", message, ("communication.replicas",))


def whole(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that a data set to be read once has an end."""
    if not job.validation.enable or job.validation.steps != -1:
        return
    task = MODELS[job.model.name].task
    if not TASKS[task].hides_ended:
        message = (
            f"batches of the task {task} must all have the same size; give the number of batches"
        )
        yield Problem("validation.steps", message, ("model",))
    for name in job.validation.datasets:
        if name in DATASETS and DATASETS[name].drawn:
            message = f'the data set "{name}" has no end; give the number of batches'
            yield Problem("validation.steps", message, ("validation.dataset",))


def picture(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that one rank has all outputs for the picture."""
    v, p = job.validation, job.parallelism
    draws = v.enable and v.picture and TASKS[MODELS[job.model.name].task].has_picture
    if draws and not p.has_outputs:
        message = (
            "nothing is drawn, as no rank has the whole output for a sample: in a pipeline "
            "none has, with tensor parallelism only by parallelism.disable_loss_parallel = "
            "true"
        )
        yield Problem("validation.picture", message, ("parallelism",), "note")


def held_out(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that validation has one source of data, by default of the kind that is trained on."""
    validation, trained = job.validation, job.data.dataset
    if not validation.enable:
        return
    if job.data.validation_fraction is not None:
        for key in ("dataset", "dataset_path"):
            if getattr(validation, key) != type(validation).model_fields[key].default:
                message = "data.validation_fraction holds out documents instead; remove one"
                yield Problem(f"validation.{key}", message, ("data",))
        return
    is_said = validation.model_fields_set & {"dataset", "dataset_path"}
    if not is_said and not trained.startswith(EMBEDDED):
        message = (
            "this part of Python's standard library is held out for runs that train on it, and "
            f"data.dataset is {show(trained)}; name text of the same kind that is held out, or "
            "set data.validation_fraction"
        )
        yield Problem("validation.dataset", message, ("data.dataset",), "note")
