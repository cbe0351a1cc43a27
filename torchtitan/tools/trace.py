"""Summarize what happened on each rank of a run, from the traces it wrote."""

from pathlib import Path
from typing import Annotated

import typer

from torchtitan.flight_recorder import read_traces, report
from torchtitan.tools.options import Verb, verb

app = verb()


@app.command(cls=Verb, help=__doc__)
def trace(
    folder: Annotated[
        Path,
        typer.Argument(help="comm.save_traces_folder of the run: outputs/x/comm_traces"),
    ],
) -> None:
    print(*report(read_traces(folder)), sep="\n")
