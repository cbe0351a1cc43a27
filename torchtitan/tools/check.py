"""Validate a recipe without starting anything; print its mistakes, or its size and batch."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer

from torchtitan import config
from torchtitan.checks import load_job, section_problems
from torchtitan.checks.memory_limits import SMALLER, of_rank, room
from torchtitan.config import (
    ConfigError,
    PlannedWorld,
    Problem,
    RecipeError,
    json_schema,
    print_error,
    print_message,
)
from torchtitan.device import GIB, Device, pick
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.optim import describe_rules, name_parameters
from torchtitan.parallel import stages
from torchtitan.parts import resume_policy
from torchtitan.provenance import to_toml
from torchtitan.tasks import TASKS
from torchtitan.tools.options import Choice, Count, Recipe, RecipeVerb, number, verb
from torchtitan.train import problems_of_files, problems_of_task, require_recipe

TOKENIZER = "model.tokenizer_path"

app = verb()


@app.command(cls=RecipeVerb, help=__doc__)
def check(
    context: typer.Context,
    recipe: Recipe = None,
    world_size: Annotated[
        int | None, Count("Number of ranks (default: the minimum of the layout).")
    ] = None,
    device: Annotated[
        str | None, Choice(("cpu", "cuda"), "Device of the run (default: this machine's).")
    ] = None,
    device_memory: Annotated[
        float | None,
        typer.Option(
            parser=number("GiB, a number > 0", lambda found: found > 0),
            metavar="GIB",
            help="Memory of a device; a recipe estimated to need more per rank is an error.",
            show_default=False,
        ),
    ] = None,
    here: Annotated[
        bool,
        typer.Option("--here", help="Also check this machine: its memory, files and packages."),
    ] = False,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print the recipe with every key, as TOML, instead.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the JSON Schema of recipes, for editors.")
    ] = False,
) -> int:
    if schema:
        print(json.dumps(json_schema(JobConfig), indent=1))
        return 0
    path, flags = config.split_recipe([*([recipe] if recipe else []), *context.args])
    require_recipe(path, flags, "check")
    device = device or pick().type

    def load(
        ranks: int | None, *more: str, exempt: Sequence[str] = (TOKENIZER,)
    ) -> config.Recipe[JobConfig]:
        local = (ranks or sys.maxsize) if here else None
        words = (path, [*flags, *more], ranks, device)
        return load_job(*words, is_here=here, local_ranks=local, exempt=exempt)

    try:
        found = load(world_size)
    except RecipeError:
        load(world_size, exempt=())  # reports the tokenizer too
        raise
    job, ranks = found.config, world_size or found.config.parallelism.least_ranks
    sections = section_problems(job, job, PlannedWorld(world_size, device))
    missing = [problem for problem in sections if problem.path == TOKENIZER]
    # The facts are printed even so, since downloading a tokenizer may need a permission.
    wrong = [found.line(problem) for problem in (*missing, *problems_of_files(job))]
    wrong += map(found.line, [] if wrong else problems_of_task(job))
    if device_memory:
        wrong += excess(device_memory, ranks, load)
    notices = found.notices
    if here and device == pick().type == "cpu":  # of CUDA devices none is this process's own
        notices += map(found.line, room(job, ranks, ranks, Device("cpu")))
    start = [] if missing else beginning(found, here)
    if wrong:
        print_error(RecipeError(wrong))
    facts = [*summary(job, world_size, not wrong), *start]
    # In one piece, so that `| head` does not close the pipe in between.
    print(to_toml(job) if resolved else "".join(f"{line}\n" for line in facts), end="")
    for notice in notices:
        print_message("note", notice)
    return 2 if wrong else 0


def excess(
    limit: float, ranks: int, load: Callable[..., config.Recipe[JobConfig]]
) -> Iterator[str]:
    """Yield the mistake that a rank takes more than `limit` GiB, with what takes less."""

    def taken(ranks: int, *flags: str) -> float:
        try:
            needs = of_rank(load(ranks, *flags).config, ranks)
        except RecipeError:
            needs = None
        return needs.estimate().on_device / GIB if needs else math.inf

    held = taken(ranks)
    if held <= limit:
        return
    recomputed, single = "--activation_checkpoint.mode full", "--training.local_batch_size 1"
    less = [(ranks, flags) for flags in (recomputed, single, f"{recomputed} {single}")]
    more = [(ranks << n, flags) for flags in ("", recomputed) for n in range(1, 11)]
    uses = []
    for choices in (less, more):
        for on, flags in choices:
            if (size := taken(on, *flags.split())) <= limit:
                words = f"--world-size {on} {flags}" if on > ranks else flags
                uses.append(f"{words.strip()} ({size:.1f} GiB)")
                break
    fix = f"use {', or '.join(uses)}" if uses else SMALLER
    yield f"--device-memory: got {limit:g}; a rank takes about {held:.1f} GiB; {fix}"


def beginning(found: config.Recipe[JobConfig], here: bool) -> list[str]:
    """Describe the checkpoint a run starts from, if any; refuse one that does not fit.

    Checkpoints of the run itself count if it is to run `here`.
    """
    policy, path = resume_policy(found.config), found.config.checkpoint.initial_load_path
    if here:
        start = policy.start()
    elif path is None:
        return []
    else:
        try:
            start = policy.initial()
        except ConfigError as error:
            found.refuse([Problem("checkpoint.initial_load_path", str(error))])
            raise
    if start.path is None:
        return ["starts from scratch"]
    what = "starts from the weights in" if start.model_only else "resumes from"
    return [f"{what} {start.path}", *start.changes]


def summary(job: JobConfig, world_size: int | None, is_valid: bool = True) -> Iterator[str]:
    """Summarize a recipe: ranks, model, memory, batch."""
    ranks = world_size or job.parallelism.least_ranks
    degrees, t = job.degrees(ranks), job.training
    layout = ", ".join(f"{axis} {size}" for axis, size in degrees._asdict().items())
    hint = "" if world_size else "; --world-size N checks another number"
    valid = "valid " * is_valid
    yield f"{valid}on {ranks} rank{'s' * (ranks > 1)}: {layout}{hint}"
    spec, args = MODELS[job.model.name], job.model_args()
    task, samples = TASKS[spec.task], job.global_batch(degrees)
    network = build_empty(spec.build, args, t.seq_len)
    yield (
        f"{job.model.name} {job.model.flavor}: {count_parameters(network).total:,} parameters, "
        f"{spec.flops_per_unit(args, t.seq_len):.3g} floating-point operations per {task.unit[:-1]}"
    )
    if needs := of_rank(job, ranks):
        least = f"{needs.least().total / GIB:.1f} GiB"
        yield f"estimated memory per rank: {needs.estimate()}; lower bound: {least}"
    yield (
        f"{samples:,} {'sequences' if task.units(2) > 1 else task.unit} per optimizer step: "
        f"{job.local_batch(degrees)} at a time x {job.accumulation(degrees)} accumulated x "
        f"{job.data_ranks(degrees)} data-parallel"
    )
    count = samples * task.units(t.seq_len)
    yield f"{count:,} {task.unit} per step, {count * t.steps:,} in {t.steps:,} steps"
    if note := job.batch_note(degrees):
        yield note
    if degrees.pp > 1:
        microbatches = job.parallelism.microbatches(job.local_batch(degrees))
        yield stages.describe(job.parallelism, len(spec.blocks(network)), microbatches)
        if extra := spec.shapes(args, t.seq_len).extra_hidden:
            yield f"each stage hands on {1 + extra} times as much in training: later tokens too"
    for auxiliary in job.auxiliary_losses:
        yield f"auxiliary loss {auxiliary.described()}"
    yield from describe_rules(job.optimizer, name_parameters([network], spec.role))
