"""Train a few steps in a recipe's layout and on one rank, on the CPU, and compare them."""

from typing import Annotated

import typer

from torchtitan.config import split_recipe
from torchtitan.tools.options import Count, Recipe, RecipeVerb, Shrink, verb
from torchtitan.tools.verify import verify

app = verb()


@app.command(cls=RecipeVerb, help=__doc__)
def verify_parallelism(
    context: typer.Context,
    recipe: Recipe = None,
    world_size: Annotated[
        int | None, Count("Number of ranks (default: the minimum that shows the layout).")
    ] = None,
    steps: Annotated[int | None, Count("Number of optimizer steps (default: 5).")] = None,
    shrink: Shrink = False,
) -> int:
    path, flags = split_recipe([*([recipe] if recipe else []), *context.args])
    is_same = verify(path, flags, world_size=world_size, steps=steps, shrink=shrink)
    return 0 if is_same else 1
