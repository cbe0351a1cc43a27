"""Validate a recipe without starting anything, and print it resolved."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Annotated

import typer

from torchtitan import config
from torchtitan.checks import load_job, section_problems
from torchtitan.checks.memory_limits import of_rank, room
from torchtitan.config import ConfigError, PlannedWorld, Problem, RecipeError, json_schema
from torchtitan.device import GIB, Device, pick
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.optim import describe_rules, name_parameters
from torchtitan.parallel import stages
from torchtitan.parts import resume_policy
from torchtitan.provenance import to_toml
from torchtitan.tasks import TASKS
from torchtitan.tools.options import Choice, Count, Recipe, RecipeVerb, verb
from torchtitan.train import problems_of_files, problems_of_task

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
    here: Annotated[
        bool,
        typer.Option("--here", help="Also check this machine: its memory, files and packages."),
    ] = False,
    schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the JSON Schema of recipes, for editors.")
    ] = False,
) -> None:
    if schema:
        print(json.dumps(json_schema(JobConfig), indent=1))
        return
    path, flags = config.split_recipe([*([recipe] if recipe else []), *context.args])
    device = device or pick().type
    load = partial(
        load_job,
        path,
        flags,
        world_size,
        device,
        is_here=here,
        local_ranks=(world_size or sys.maxsize) if here else None,
    )
    try:
        found = load(exempt=[TOKENIZER])
    except RecipeError:
        load()  # says it of the tokenizer, too
        raise
    found.refuse(problems_of_files(found.config))
    job = found.config
    world = PlannedWorld(world_size, device)
    missing = [
        problem for problem in section_problems(job, job, world) if problem.path == TOKENIZER
    ]
    if not missing:
        found.refuse(problems_of_task(job))
    notices, ranks = found.notices, world_size or job.parallelism.least_ranks
    if here and device == pick().type == "cpu":  # of CUDA devices none is this process's own
        notices += map(found.line, room(job, ranks, ranks, Device("cpu")))
    lines = [*notices, *summary(job, world_size), *([] if missing else beginning(found))]
    # In one piece, so that `| head` does not close the pipe in between.
    print("".join(f"# {line}\n" for line in lines) + to_toml(job), end="")
    if missing:
        # A tokenizer that only those who are granted it can download says nothing of the rest.
        raise ConfigError("\n".join(map(found.line, missing)))


def beginning(found: config.Recipe[JobConfig]) -> list[str]:
    """Describe the checkpoint a run starts from, if any; refuse one that does not fit."""
    path = found.config.checkpoint.initial_load_path
    if path is None:
        return []
    try:
        start = resume_policy(found.config).initial()
    except ConfigError as error:
        found.refuse([Problem("checkpoint.initial_load_path", str(error))])
        raise
    what = "the weights" if start.model_only else "the run"
    return [f"starts from {what} in {start.path}", *start.changes]


def summary(job: JobConfig, world_size: int | None) -> Iterator[str]:
    """Summarize a recipe: ranks, batch, model."""
    ranks = world_size or job.parallelism.least_ranks
    degrees, t = job.degrees(ranks), job.training
    layout = ", ".join(f"{axis} {size}" for axis, size in degrees._asdict().items())
    hint = "" if world_size else "; --world-size N checks for N"
    yield f"valid on {ranks} rank{'s' * (ranks > 1)}: {layout}{hint}"
    spec = MODELS[job.model.name]
    task, samples = TASKS[spec.task], job.global_batch(degrees)
    yield (
        f"{samples:,} {'sequences' if task.units(2) > 1 else task.unit} per optimizer step: "
        f"{job.local_batch(degrees)} at a time x {job.accumulation(degrees)} accumulated x "
        f"{job.data_ranks(degrees)} data-parallel"
    )
    if note := job.batch_note(degrees):
        yield note
    count = samples * task.units(t.seq_len)
    yield f"{count:,} {task.unit} per step, {count * t.steps:,} in {t.steps:,} steps"
    args = job.model_args()
    network = build_empty(spec.build, args, t.seq_len)
    if degrees.pp > 1:
        microbatches = job.parallelism.microbatches(job.local_batch(degrees))
        yield stages.describe(job.parallelism, len(spec.blocks(network)), microbatches)
        if extra := spec.shapes(args, t.seq_len).extra_hidden:
            yield f"each stage hands on {1 + extra} times as much in training: later tokens too"
    yield (
        f"{job.model.name} {job.model.flavor}: {count_parameters(network).total:,} parameters, "
        f"{spec.flops_per_unit(args, t.seq_len):.3g} floating-point operations per {task.unit[:-1]}"
    )
    for auxiliary in job.auxiliary_losses:
        yield f"auxiliary loss {auxiliary.described()}"
    yield from describe_rules(job.optimizer, name_parameters([network], spec.role))
    if needs := of_rank(job, ranks):
        least = f"{needs.least().total / GIB:.1f} GiB"
        yield f"memory of a rank: about {needs.estimate()}, at the least {least}"
