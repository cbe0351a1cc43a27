"""Reads a recipe, and says which settings, each valid, cannot work together, and what would.

All checks run before any process group exists and touch nothing but file names.
"""

import importlib
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from torchtitan import legacy_recipes
from torchtitan.checks.computing import (
    problems_of_compiler,
    problems_of_cuda_graphs,
    problems_of_data_parallelism,
    problems_of_machine,
    problems_of_optimizer,
    problems_of_precision,
)
from torchtitan.checks.layout import (
    DEGREES,
    problems_of_batches,
    problems_of_degrees,
    problems_of_sequences,
    smallest_world,
)
from torchtitan.checks.model import problems_of_converters, problems_of_loss, problems_of_model
from torchtitan.checks.remarks import remarks
from torchtitan.checks.running import (
    problems_of_checkpoints,
    problems_of_files,
    problems_of_groups,
    problems_of_restarts,
)
from torchtitan.config import KeyPath, Problem, Recipe, Setting, load, show
from torchtitan.job import JobConfig
from torchtitan.metrics import check_metrics
from torchtitan.profiling import check_profiling

__all__ = [
    "load_job",
    "problems",
    "problems_of_machine",
    "problems_of_restarts",
    "remarks",
    "smallest_world",
]


def load_job(
    recipe: str | Path | None,
    flags: Sequence[str],
    world_size: int | range | None,
    device_type: str,
    *,
    spared: Collection[str] = (),
    over: Sequence[dict[KeyPath, Setting]] = (),
) -> Recipe[JobConfig]:
    """Read and check a recipe for `world_size` ranks; None: for any number that fits it.

    A range: for each of these numbers, as the run may change from one to another.

    Of the keys in `spared` it does not matter how they fit the others and this machine. The
    settings in `over` win over those of the recipe.

    Raises:
        RecipeError: with all mistakes, one line each; CannotRun where each setting by itself is
            valid.
    """

    def check(job: JobConfig) -> Iterator[Problem]:
        if isinstance(world_size, range):
            found = problems_of_range(job, world_size, device_type)
        else:
            found = problems(job, world_size, device_type)
        return (problem for problem in found if problem.path not in spared)

    return load(
        JobConfig,
        recipe,
        flags,
        over=over,
        translate=legacy_recipes.translate,
        new_name=legacy_recipes.new_name,
        prepare=_import_first,
        check=check,
    )


def _import_first(settings: dict[KeyPath, Setting]) -> Iterator[str]:
    """Import the modules of `job.imports`, which may add names that the recipe uses."""
    setting = settings.get(("job", "imports"))
    if setting is None or not isinstance(setting.value, list):
        return
    for name in map(str, setting.value):
        where = f"{setting.origin}: job.imports: got {show(name)}"
        if not all(part.isidentifier() for part in name.split(".")):
            yield f"{where}; wanted the dotted name of a module"
            continue
        try:
            importlib.import_module(name)
        except ImportError as error:
            yield f"{where}; it cannot be imported: {error}"


def problems(job: JobConfig, world_size: int | None, device_type: str) -> Iterator[Problem]:
    """Everything about a recipe, valid in form, that cannot work."""
    yield from problems_of_degrees(job, world_size)
    yield from problems_of_model(job, world_size)
    yield from problems_of_compiler(job, None)
    yield from problems_of_cuda_graphs(job, world_size)
    yield from problems_of_data_parallelism(job, world_size)
    yield from problems_of_sequences(job)
    yield from problems_of_batches(job, world_size)
    yield from problems_of_precision(job)
    yield from problems_of_converters(job)
    yield from problems_of_loss(job)
    yield from problems_of_optimizer(job, world_size)
    yield from problems_of_files(job)
    yield from problems_of_checkpoints(job)
    yield from problems_of_groups(job)
    for key, message in check_metrics(job.metrics):
        yield Problem(key, message)
    for key, message in check_profiling(job.profiling, device_type):
        yield Problem(key, message, ("profiling",))


def problems_of_range(job: JobConfig, sizes: range, device_type: str) -> Iterator[Problem]:
    """Everything that cannot work in a run whose number of ranks may change, told once each."""
    batch, found = "training.global_batch_size", dict[Problem, list[int]]()
    for size in sizes:
        for problem in problems(job, size, device_type):
            found.setdefault(problem, []).append(size)
    for problem, at in found.items():
        on = "" if len(at) == len(sizes) else f"on {_count(at)}: "
        if problem.path != batch:
            yield problem._replace(message=on + problem.message)
    yield from problems_of_restarts(job)
    if job.fault_tolerance.enable and len(sizes) > 1:
        message = f"the run may have {_count(sizes)}; all replica groups need as many"
        yield Problem("fault_tolerance.enable", message)
    misfits = sorted(
        {size for problem, at in found.items() if problem.path == batch for size in at}
    )
    why = f"it does not fit {_count(misfits)}"
    if job.training.global_batch_size == -1:
        why = "it would change with the number of ranks"
    elif not misfits:
        return
    each = job.training.local_batch_size
    once = [each * job.data_ranks(job.degrees(size)) for size in sizes]
    fits = math.lcm(*filter(None, once))
    near = max(round(job.training.global_batch_size / fits), 1) * fits
    message = f"{why}; {near} fits all from {sizes[0]} to {sizes[-1]}"
    yield Problem(batch, message, ("training.local_batch_size", *DEGREES))


def _count(ranks: Sequence[int]) -> str:
    return f"{' or '.join(map(str, ranks))} rank{'s' * (list(ranks) != [1])}"
