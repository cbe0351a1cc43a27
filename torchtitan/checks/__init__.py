"""Checks of a recipe: settings, each valid, that cannot work together, with a remedy.

Each section finds its own problems (`Config.problems`), and one that is chosen by name also those
between it and others. A rule here finds all other problems between sections: one file per subject,
one function per rule, all with one signature. Training, `check`, `compare`, `verify` and the
launcher collect them all by `problems`, before any process group exists, reading nothing but file
names and the tokenizer of a debug model.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from torchtitan.checks import (
    converting,
    divisibility,
    execution,
    limits,
    model,
    pipelining,
    services,
    training_stages,
)
from torchtitan.checks.model import follow_tokenizer
from torchtitan.config import (
    Config,
    ConfigError,
    Context,
    KeyPath,
    PlannedWorld,
    Problem,
    Recipe,
    Setting,
    Sources,
    gather,
    hub,
    import_extension,
    is_hub_id,
    load,
    local_path,
    located,
    read_sources,
    show,
)
from torchtitan.job import RECIPE_FILE, JobConfig, JobSection
from torchtitan.torchtitan_keys import refuse_foreign

Settings = dict[KeyPath, Setting]

RULES: tuple[Callable[[JobConfig, PlannedWorld], Iterator[Problem]], ...] = (
    divisibility.degrees,
    model.sizes,
    model.tensor_parallelism,
    model.context_parallelism,
    model.ulysses,
    model.content,
    model.lengths,
    model.router_bias,
    model.expert_parallelism,
    pipelining.pipeline,
    execution.async_tensor_parallelism,
    execution.recomputation,
    execution.communication,
    execution.regathering,
    execution.accumulating,
    execution.in_hooks,
    divisibility.sequences,
    divisibility.batches,
    training_stages.order,
    converting.sent,
    converting.converters,
    converting.loss,
    model.losses,
    model.block_losses,
    execution.updates_in_backward,
    execution.copies_after_backward,
    execution.states_in_host_memory,
    execution.clipped_twice,
    execution.groups,
    execution.schedule,
    services.folders,
    services.formats,
    services.skipped,
    services.restarts,
    services.rollbacks,
    services.spikes,
    services.shapes,
    services.averages,
    services.whole,
    services.held_out,
    services.picture,
    limits.samples,
    limits.bfloat16,
)


ELSEWHERE = (
    *("model.tokenizer_path", "data.dataset_path", "data.sources.*.path"),
    *("validation.dataset_path", "checkpoint.initial_load_path"),
)
"""Keys of files that need not be on the machine where a recipe is planned, or a job prepared."""


def load_job(
    recipe: str | Path | Sources | None,
    flags: Sequence[str],
    ranks: int | range | None,
    device_type: str,
    *,
    is_here: bool = False,
    may_restart: bool = False,
    local_ranks: int | None = None,
    exempt: Collection[str] = (),
    over: Sequence[Settings] = (),
) -> Recipe[JobConfig]:
    """Read and check a recipe for a number of ranks; None: for any number that fits it.

    Args:
        recipe: a TOML file, the name of a packaged recipe, or settings that were read.
        ranks: a range is checked for each of its numbers, as the run may change between them.
        is_here: whether capabilities that this machine lacks are mistakes, too.
        may_restart: whether failed processes are restarted; with a range they are.
        local_ranks: number of ranks that are started on this machine.
        exempt: keys, with `*` for any number, that need not fit the others and this machine.
        over: settings that win over those of the recipe.

    Raises:
        RecipeError: with all mistakes, one line each; CannotRun if each setting by itself is valid.
    """

    def check(job: JobConfig) -> Iterator[Problem]:
        world = PlannedWorld(None, device_type, is_here, may_restart, local_ranks)
        if isinstance(ranks, range):
            found = problems_of_range(job, ranks, replace(world, may_restart=True))
        else:
            found = problems(job, replace(world, ranks=ranks))
        return (problem for problem in found if not is_error_of(problem, exempt))

    sources = recipe if isinstance(recipe, Sources) else read_sources(recipe)
    refuse_foreign(sources.settings)
    gathered = gather(JobConfig, sources, flags, over, _import_first)
    if is_here:
        gathered.problems.extend(read_repositories(gathered.settings))
    follow_tokenizer(gathered)
    return load(JobConfig, gathered, check)


REPOSITORIES = {
    "model.tokenizer_path": hub.TOKENIZER,
    "checkpoint.initial_load_path": hub.WEIGHTS,
    **dict.fromkeys(
        [
            *("data.dataset", "data.dataset_path", "data.sources.*.path"),
            *("validation.dataset", "validation.dataset_path"),
        ],
        hub.DATA,
    ),
}
"""Keys that may name a repository of the Hugging Face hub, and what is read of it."""


def read_repositories(settings: Settings) -> Iterator[str]:
    """Download the repositories that settings name, and add their commits to them.

    A run that was launched before stays at its commits.

    Yields:
        Mistakes.
    """
    for path, setting in [*settings.items()]:
        value, key = setting.value, ".".join(path)
        files = [files for name, files in REPOSITORIES.items() if fnmatchcase(key, name)]
        if not files or not isinstance(value, str) or not is_hub_id(value):
            continue
        dump = settings.get(("job", "dump_folder"))
        folder = local_path(str(dump.value if dump else JobSection().dump_folder))
        try:
            value = hub.recorded(value, path, folder / RECIPE_FILE)
            settings[path] = Setting(hub.pinned(value, files[0]), setting.origin)
        except ConfigError as error:
            yield f"{located(setting.origin, key)}: got {error}"


def is_error_of(problem: Problem, keys: Collection[str]) -> bool:
    """Whether a problem is an error, with one of the keys, as in `ELSEWHERE`."""
    return problem.severity == "error" and any(fnmatchcase(problem.path, key) for key in keys)


def _import_first(settings: dict[KeyPath, Setting]) -> Iterator[str]:
    """Import the modules of `job.imports`, which may register names that the recipe uses."""
    setting = settings.get(("job", "imports"))
    if setting is None or not isinstance(setting.value, list):
        return
    for name in map(str, setting.value):
        where = f"{located(setting.origin, 'job.imports')}: got {show(name)}"
        if not all(part.isidentifier() for part in name.split(".")):
            yield f"{where}; wanted the dotted name of a module"
            continue
        try:
            import_extension(name)
        except ConfigError as error:
            yield f"{where}; {error}"


def problems(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Find errors and warnings of a well-formed recipe."""
    if too_large := list(limits.numbers(job, world)):
        yield from too_large
        return
    yield from section_problems(job, job, world)
    found = [problem for rule in RULES for problem in rule(job, world)]
    yield from found
    yield from training_stages.of_each(job, world, RULES, found)


def section_problems(
    config: Config, job: JobConfig, world: PlannedWorld, path: KeyPath = ()
) -> Iterator[Problem]:
    """Find the problems reported by each section and those within it."""
    name = ".".join(path)
    for problem in config.problems(Context(job, world, name)):
        yield problem.within(name)
    for key, value in config:
        if isinstance(value, Config):
            yield from section_problems(value, job, world, (*path, key))
        for number, item in enumerate(value) if isinstance(value, tuple) else ():
            if isinstance(item, Config):
                yield from section_problems(item, job, world, (*path, key, str(number)))


def problems_of_range(job: JobConfig, sizes: range, world: PlannedWorld) -> Iterator[Problem]:
    """Find all problems of a run whose number of ranks may change, once each."""
    batch, found = divisibility.BATCH, dict[Problem, list[int]]()
    for size in sizes:
        for problem in problems(job, replace(world, ranks=size)):
            found.setdefault(problem, []).append(size)
    for problem, at in found.items():
        on = "" if len(at) == len(sizes) else f"on {_count(at)}: "
        if problem.path != batch:
            yield problem._replace(message=on + problem.message)
    if job.fault_tolerance.enable and len(sizes) > 1:
        message = f"the run may have {_count(sizes)}; all replica groups need the same number"
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
    message = f"{why}; use {near}, which fits all from {sizes[0]} to {sizes[-1]}"
    yield Problem(batch, message, ("training.local_batch_size", *divisibility.DEGREES))


def _count(ranks: Sequence[int]) -> str:
    return f"{' or '.join(map(str, ranks))} rank{'s' * (list(ranks) != [1])}"
