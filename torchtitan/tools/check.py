"""Validate a recipe without starting anything, and print it resolved."""

import json
from collections.abc import Iterator
from typing import Annotated

import typer

from torchtitan.checks import load_job
from torchtitan.config import json_schema
from torchtitan.device import pick
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.parallel import stages
from torchtitan.provenance import to_toml
from torchtitan.tools.options import Choice, Count, Recipe, RecipeVerb, verb
from torchtitan.train import problems_of_task, split_recipe

app = verb()


@app.command(cls=RecipeVerb, help=__doc__)
def check(
    context: typer.Context,
    recipe: Recipe = None,
    world_size: Annotated[int | None, Count("ranks; absent: any number that fits")] = None,
    device: Annotated[str | None, Choice(("cpu", "cuda"), "absent: this machine's")] = None,
    schema: Annotated[
        bool, typer.Option("--json-schema", help="print the schema for editors")
    ] = False,
) -> None:
    if schema:
        print(json.dumps(json_schema(JobConfig), indent=1))
        return
    path, flags = split_recipe([*([recipe] if recipe else []), *context.args])
    found = load_job(path, flags, world_size, device or pick().type)
    found.refuse(problems_of_task(found.config))
    job = found.config
    lines = [*found.notices, *summary(job, world_size)]
    # In one piece, so that `| head` does not close the pipe in between.
    print("".join(f"# {line}\n" for line in lines) + to_toml(job), end="")


def summary(job: JobConfig, world_size: int | None) -> Iterator[str]:
    """What a recipe comes to: ranks, batch, model."""
    ranks = world_size or job.parallelism.least_ranks
    degrees, t = job.degrees(ranks), job.training
    layout = ", ".join(f"{axis} {size}" for axis, size in degrees._asdict().items())
    hint = "" if world_size else "; --world-size N checks for N"
    yield f"valid on {ranks} rank{'s' * (ranks > 1)}: {layout}{hint}"
    sequences = job.global_batch(degrees)
    yield (
        f"{sequences:,} sequences in an optimizer step: {t.local_batch_size} at a time x "
        f"{job.accumulation(degrees)} accumulated x {job.data_ranks(degrees)} data-parallel"
    )
    tokens = sequences * t.seq_len
    yield f"{tokens:,} tokens in a step, {tokens * t.steps:,} in {t.steps:,} steps"
    spec = MODELS[job.model.name]
    args = job.model_args()
    if degrees.pp > 1:
        microbatches = job.parallelism.microbatches(t.local_batch_size)
        yield stages.describe(job.parallelism, args.n_layers, microbatches)
    parameters = count_parameters(build_empty(spec.build, args, t.seq_len)).total
    yield (
        f"{job.model.name} {job.model.flavor}: {parameters:,} parameters, "
        f"{spec.flops_per_unit(args, t.seq_len):.3g} floating-point operations a token"
    )
