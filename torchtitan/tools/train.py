"""Train from a recipe; `torchtitan train --help` shows every setting."""

from typing import Any

import typer
from typer.core import TyperCommand

from torchtitan.tools.options import complete_setting, verb
from torchtitan.train import main


class Train(TyperCommand):
    """Leaves all words to `torchtitan.train`, `--help` among them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return args

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        return complete_setting(incomplete)


app = verb()


@app.command(cls=Train, help=__doc__)
def train(context: typer.Context) -> int:
    return main(context.args)
