"""Kill a run on the CPU, resume it, also in another layout; compare with an uninterrupted run."""

from typing import Annotated

import typer

from torchtitan.config import split_recipe
from torchtitan.tools.options import Count, Recipe, RecipeVerb, Shrink, verb
from torchtitan.tools.verify.resume import verify_resume as verify
from torchtitan.tools.verify.resume_recipe import read_layout

app = verb()


@app.command(cls=RecipeVerb, help=__doc__)
def verify_resume(
    context: typer.Context,
    recipe: Recipe = None,
    world_size: Annotated[
        int | None, Count("Number of ranks (default: the minimum that shows the layout).")
    ] = None,
    then: Annotated[
        int | None,
        Count("Number of ranks to resume on, with FSDP (default: half of the ranks, or 2)."),
    ] = None,
    then_layout: Annotated[
        str | None, typer.Option(metavar="AXES", help="Other layout to resume in: tp=2,dp_shard=2.")
    ] = None,
    steps: Annotated[
        int | None, Count("Number of steps before the kill, and after it (default: 3).")
    ] = None,
    shrink: Shrink = False,
) -> int:
    if then and then_layout:
        raise typer.BadParameter("--then and --then-layout both name a layout; keep one")
    path, flags = split_recipe([*([recipe] if recipe else []), *context.args])
    layout = read_layout(then_layout) if then_layout else {"dp_shard": then} if then else {}
    is_same = verify(path, flags, world_size=world_size, steps=steps, shrink=shrink, then=layout)
    return 0 if is_same else 1
