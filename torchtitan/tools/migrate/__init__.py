"""Convert a recipe of TorchTitan v0.1 or v0.2 to the keys of this version."""

from pathlib import Path
from typing import Annotated

import typer

from torchtitan.checks import load_job
from torchtitan.config import (
    CannotRun,
    ConfigError,
    RecipeError,
    Sources,
    print_message,
    read_recipe,
    read_text,
)
from torchtitan.tools.migrate.rewrite import rewrite
from torchtitan.tools.migrate.translate import Migration, read_old
from torchtitan.tools.options import Output, Verb, verb
from torchtitan.torchtitan_keys import refuse_foreign

app = verb()


@app.command(cls=Verb, help=__doc__)
def migrate(
    recipe: Annotated[Path, typer.Argument(help="Recipe of TorchTitan v0.1 or v0.2.")],
    output: Output = None,
) -> None:
    migration = read_old(recipe)
    text = rewrite(read_text(recipe), migration)
    for notice in [*migration.notices, *missing(recipe, migration)]:
        print_message("note", notice)
    if output is None:
        print(text, end="")
    elif output.exists():
        raise ConfigError(f"{output}: already exists; nothing was written")
    else:
        output.write_text(text, encoding="utf-8")


def missing(recipe: Path, migration: Migration) -> list[str]:
    """The reasons why a translated recipe cannot be trained here.

    Raises:
        RecipeError: if a setting is impossible, such as a model that does not exist here.
    """
    sources = migrated(recipe, migration)
    *extended, _, _ = sources.settings
    try:
        refuse_foreign(extended)
    except RecipeError as error:
        return [f"it cannot be trained yet: {line}" for line in error.lines]
    try:
        load_job(sources, [], None, "cuda")
    except RecipeError as error:
        # What a module adds is unknown if it cannot be imported.
        is_known = not any(": job.imports: " in line for line in error.lines)
        if is_known and not isinstance(error, CannotRun):
            raise RecipeError(error.lines, [*migration.notices, *error.notices]) from error
        return [f"it cannot be trained yet: {line}" for line in error.lines]
    return []


def migrated(recipe: Path, migration: Migration) -> Sources:
    """The settings of a migrated recipe, at their places in the old one."""
    problems: list[str] = []
    extended = read_recipe(recipe, problems)[:-1]
    own = {path: setting for path, setting in migration.settings.items() if path != ("extends",)}
    return Sources([*extended, migration.defaults, own], str(recipe), [], problems)
