"""The task and the data of a recipe, opened, and the problems that only their files show.

It needs no part of the run itself, so that a check imports little.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torchtitan.config import ConfigError, Problem, RecipeError
from torchtitan.data import BatchStream, DataConfig
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.parallel import Degrees, World
from torchtitan.tasks import TASKS, Task


def open_task(job: JobConfig) -> Task:
    """Open the training task, with its requirements in addition to the data: a tokenizer, say."""
    task = TASKS[MODELS[job.model.name].task](job.model, job.model_args())
    task.adapt(job.data)
    return task


def open_stream(
    job: JobConfig,
    task: Task,
    degrees: Degrees,
    *,
    rank: int,
    once: bool = False,
    device: Device | None = None,
) -> BatchStream:
    """Open the data of one of `job.data_ranks`, for a device."""
    return task.open_stream(
        job.data,
        seed=job.debug.seed,
        seq_len=job.training.seq_len,
        steps=job.training.steps,
        once=once,
        local_batch_size=job.local_batch(degrees),
        accumulation=job.accumulation(degrees),
        rank=rank,
        ranks=job.data_ranks(degrees),
        groups=job.fault_tolerance.groups,
        device=device,
        sizes=job.step_sizes(degrees),
    )


def validation_streams(
    job: JobConfig, task: Task, training: BatchStream, world: World
) -> tuple[int, dict[str, Callable[[], BatchStream]]]:
    """Return the microbatches in a batch of validation, and functions that open each data set.

    Held-out data is read in the order of the version that started `training`.
    """
    config = job.validation
    # A replica group validates alone, on the batches of all, and may fail while it does.
    alone = job.accumulation(world.degrees) * job.fault_tolerance.groups
    accumulation = alone if config.unit == "global" else 1

    def open_held_out(data: DataConfig) -> BatchStream:
        stream = task.open_stream(
            data,
            seed=job.debug.seed,
            seq_len=config.seq_len or job.training.seq_len,
            once=config.steps == -1,
            local_batch_size=config.local_batch_size or job.local_batch(world.degrees),
            accumulation=accumulation,
            rank=world.data_rank,
            ranks=world.degrees.data,
        )
        if training.earlier:
            stream.follow(training.earlier)
        return stream

    held_out = config.data(job.data)
    return accumulation, {name: partial(open_held_out, data) for name, data in held_out.items()}


def problems_of_files(job: JobConfig) -> Iterator[Problem]:
    """Find problems in a first look at data files."""
    task = TASKS[MODELS[job.model.name].task]
    is_other = job.validation.enable and job.data.validation_fraction is None
    held_out = job.validation.data(job.data) if is_other else {}
    configs = [(f"data.{key}", config) for key, config in job.data.sections()]
    configs += [(f"validation.{config.key_of_files}", config) for config in held_out.values()]
    for key, config in configs:
        try:
            task.check_files(config)
        except ConfigError as error:
            yield Problem(key, str(error))


def problems_of_stream(
    job: JobConfig, ranks: int, *, is_new: bool, tokenizes: bool = True
) -> Iterator[Problem]:
    """Find problems in stored tokens, then write those of the text in a mixture and check these.

    Args:
        is_new: whether the run starts without a position in the data, so that its amounts are
            known.
        tokenizes: false: leave out text that has yet to be tokenized.
    """
    task, degrees = open_task(job), job.degrees(ranks)
    if not task.is_tokenized(job.data):
        return
    try:
        if is_new:
            sizes = job.step_sizes(degrees)
            task.check_amounts(job.data, steps=job.training.steps, sizes=sizes)
        if tokenizes:
            stream = open_stream(job, task, degrees, rank=0)
            if is_new:
                stream.check()
    except RecipeError as error:
        for line in error.lines:
            path, _, message = line.partition(": ")
            yield Problem(path, message)
    except ConfigError as error:
        yield Problem("data.sources" if job.data.sources else "data.dataset", str(error))


def require_recipe(path: str | None, flags: Sequence[str], verb: str) -> None:
    """Refuse to use the defaults alone, which train ten thousand steps, unless steps are given."""
    if path is not None or any(word.startswith("--training.steps") for word in flags):
        return
    raise ConfigError(
        f"torchtitan {verb}: got no recipe; wanted one, such as the debug recipe, which trains a "
        f"small model in minutes: torchtitan {verb} debug_model; use --training.steps N to {verb} "
        "the defaults"
    )


def problems_of_task(job: JobConfig) -> Iterator[Problem]:
    """Find problems that only reading a task's files shows, in its tokenizer, say."""
    try:
        task, others = open_task(job), job.validation.data(job.data).values()
        for data in (job.data, *(others if job.validation.enable else ())):
            task.packing(data, job.training.seq_len, job.debug.seed)
    except ConfigError as error:
        yield Problem(TASKS[MODELS[job.model.name].task].key, str(error))
