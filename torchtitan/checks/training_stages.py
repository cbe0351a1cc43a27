"""Checks of the stages of training: their order, and that each of them can run."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise

from torchtitan.checks.divisibility import BATCH
from torchtitan.checks.limits import numbers
from torchtitan.config import PlannedWorld, Problem
from torchtitan.data.sizes import least_lanes
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.tasks import TASKS

KEY = "training.stages"


def _can_be_read(job: JobConfig) -> bool:
    """Whether the stages have no problem of their own, which is reported."""
    starts = [
        (each.from_step is None) != (each.from_tokens is None) for each in job.training.stages
    ]
    return bool(starts) and all(starts) and job.training.global_batch_size > 0


def order(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that stages follow one another, and that all else may change with them."""
    t = job.training
    if not _can_be_read(job):
        return
    for number, (before, after) in enumerate(pairwise(job.stages(job.degrees(world.ranks)))):
        path = f"{KEY}.{number}.from_{'tokens' if t.stages[number].from_step is None else 'step'}"
        if after.start <= before.start:
            message = (
                f"the stage before it starts after step {before.start:,}, at {before.tokens:,} "
                "tokens; start later"
            )
            yield Problem(path, message, (BATCH,))
        elif after.start >= t.steps:
            message = f"it starts after step {after.start:,}, where the run has ended"
            yield Problem(path, message, ("training.steps", BATCH), "note")
    if job.fault_tolerance.enable:
        message = "replica groups have steps of one size; leave out the stages"
        yield Problem("fault_tolerance.enable", message, (KEY,))
    task = TASKS[MODELS[job.model.name].task]
    for number, stage in enumerate(t.stages):
        keys = [key for key in ("from_tokens", "seq_len") if getattr(stage, key) is not None]
        for key in keys if task.units(2) == 1 else ():
            message = f"samples of {job.model.name} have no tokens; use from_step, and batch sizes"
            yield Problem(f"{KEY}.{number}.{key}", message, ("model",))
        if stage.seq_len is None:
            continue
        amounts = [source.label for source in job.data.sources if source.weight is None]
        if amounts:
            message = (
                f'the data source "{amounts[0]}" has a number of tokens or epochs, which is '
                "divided into samples of one length; give it a weight"
            )
            yield Problem(f"{KEY}.{number}.seq_len", message, ("data",))
        length = job.validation.seq_len or t.seq_len
        pipelined = job.parallelism.pipeline_parallel_degree > 1
        if pipelined and job.validation.enable and stage.seq_len != length:
            message = (
                f"a pipeline exchanges sequences of one length, and those of [validation] have "
                f"{length}; use that, or validation.enable = false"
            )
            yield Problem(f"{KEY}.{number}.seq_len", message, ("validation", "parallelism"))


def of_each(
    job: JobConfig,
    world: PlannedWorld,
    rules: Sequence[Callable[[JobConfig, PlannedWorld], Iterator[Problem]]],
    known: Collection[Problem],
) -> Iterator[Problem]:
    """Find errors of the recipe with the sizes of each stage, but for those that it has anyway."""
    if not _can_be_read(job):
        return
    degrees = job.degrees(world.ranks)
    lanes = least_lanes(job.step_sizes(degrees)) if job.data.lanes == -1 else job.data.lanes
    data = job.data.model_copy(update={"lanes": lanes})
    # Validation keeps the sizes of [training].
    validation = job.validation.model_copy(update={"enable": False})
    for number, stage in enumerate(job.stages(degrees)[1:]):
        own = stage.job.model_copy(update={"data": data, "validation": validation})
        found = list(numbers(own, world))
        found = found or [each for rule in rules for each in rule(own, world)]
        for problem in found:
            if problem in known or problem.severity != "error":
                continue
            section, _, key = problem.path.partition(".")
            place = f"{KEY}.{number}"
            if section == "training" and key in job.training.stages[number].sizes:
                yield problem._replace(path=f"{place}.{key}")
            else:
                yield problem._replace(message=f"with the sizes of {place}: {problem.message}")
