"""Convert a recipe of TorchTitan v0.1 or v0.2 to the keys of this version."""

from pathlib import Path
from typing import Annotated

import typer

from torchtitan.checks import load_job
from torchtitan.config import CannotRun, ConfigError, RecipeError, print_message
from torchtitan.legacy_recipes.rewriting import migrate as migrated
from torchtitan.tools.options import Verb, verb

app = verb()


@app.command(cls=Verb, help=__doc__)
def migrate(
    recipe: Annotated[Path, typer.Argument(help="Recipe of TorchTitan v0.1 or v0.2.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="File to write (default: standard output)."
        ),
    ] = None,
) -> None:
    text, notices = migrated(recipe)
    notices += missing(recipe)
    for notice in notices:
        print_message("note", notice)
    if output is None:
        print(text, end="")
    elif output.exists():
        raise ConfigError(f"{output}: already exists; nothing was written")
    else:
        output.write_text(text, encoding="utf-8")


def missing(recipe: Path) -> list[str]:
    """The reasons why a translated recipe cannot be trained here.

    Raises:
        RecipeError: if a setting is impossible, such as a model that does not exist here.
    """
    try:
        load_job(recipe, [], None, "cuda")
    except RecipeError as error:
        # What a module adds is unknown if it cannot be imported.
        is_known = not any(": job.imports: " in line for line in error.lines)
        if is_known and not isinstance(error, CannotRun):
            raise
        return [f"it cannot be trained yet: {line}" for line in error.lines]
    return []
