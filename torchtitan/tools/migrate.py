"""Write a recipe of TorchTitan v0.1 or v0.2 in this version's form."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from torchtitan.config import ConfigError
from torchtitan.legacy_recipes.migrate import migrate as migrated
from torchtitan.tools.options import Verb, verb

app = verb()


@app.command(cls=Verb, help=__doc__)
def migrate(
    recipe: Annotated[Path, typer.Argument(help="a recipe of TorchTitan v0.1 or v0.2")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="file to write; absent: standard output"),
    ] = None,
) -> None:
    text, notices = migrated(recipe)
    print(*notices, sep="\n", end="\n" * bool(notices), file=sys.stderr)
    if output is None:
        print(text, end="")
    elif output.exists():
        raise ConfigError(f"{output}: exists already; nothing was written")
    else:
        output.write_text(text, encoding="utf-8")
