"""Checks that held-out data can be read and computed."""

from collections.abc import Iterator

from torchtitan.config import PlannedWorld, Problem, show
from torchtitan.data import DATASETS
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.tasks import TASKS

EMBEDDED = "python_stdlib"
"""Data set that needs no files; with a suffix, its held-out part."""


def shapes(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the model, built for training, takes the batches of a validation."""
    v, t, p = job.validation, job.training, job.parallelism
    if not v.enable:
        return
    length, batch = v.seq_len or t.seq_len, v.local_batch_size or 0
    pipelined = p.pipeline_parallel_degree > 1
    rests_on = ("training.seq_len", "parallelism.pipeline_parallel_degree")
    if length > t.seq_len:
        message = f"the model has positions for training.seq_len = {t.seq_len} tokens; use that"
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
