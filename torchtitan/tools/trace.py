"""Summarize what happened on each rank, from the traces it wrote."""

from pathlib import Path
from typing import Annotated

import typer

from torchtitan.flight_recorder import read_traces, report
from torchtitan.tools.history import RunHistory
from torchtitan.tools.options import Verb, verb

app = verb()


@app.command(cls=Verb, help=__doc__)
def trace(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run (job.dump_folder), or of its traces: outputs/x.")
    ],
) -> None:
    traces = RunHistory(folder).rank_traces_folder
    print(*report(read_traces(traces if traces.is_dir() else folder)), sep="\n")
