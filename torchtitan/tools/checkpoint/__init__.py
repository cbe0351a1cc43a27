"""Look at checkpoints, and convert weights from one format to another."""

from pathlib import Path
from typing import Annotated, Any

import typer

from torchtitan.checkpoint.remote import location
from torchtitan.checkpoint.weights import conversion as weights
from torchtitan.checkpoint.weights.opening import find
from torchtitan.checks import load_job
from torchtitan.logging import logger, on_terminal
from torchtitan.provenance import versions
from torchtitan.tools.checkpoint import inspection
from torchtitan.tools.options import (
    Choice,
    Flavor,
    Imports,
    Model,
    Text,
    Verb,
    import_modules,
    verb,
)

WHERE = "checkpoints (step-N), folders of them, or dump folders of runs: paths or URLs"


def Place(help: str) -> Any:
    """An argument that is a path or a URL."""
    return typer.Argument(parser=location, help=help)


Paths = Annotated[list[Path], Place(WHERE)]
OnePath = Annotated[
    Path, Place("a checkpoint, or a folder of which the newest is used: path or URL")
]

app = verb(help=__doc__)


@app.command("ls", cls=Verb)
def list_checkpoints(paths: Paths) -> None:
    """List checkpoints: step, layout, size, digest, and whether their files are there."""
    from rich.console import Console

    # Without a terminal every checkpoint has one line, whatever the length of its path.
    console = Console(width=None if on_terminal() else 10_000)
    console.print(inspection.table([p for folder in paths for p in find(folder)]))


@app.command(cls=Verb)
def verify(paths: Paths) -> int:
    """Read every byte of checkpoints, and say which are not what was saved."""
    damaged = 0
    for path in (p for folder in paths for p in find(folder)):
        is_sound, lines = inspection.verify(path)
        damaged += not is_sound
        print(*lines, sep="\n", flush=True)
    return 1 if damaged else 0


@app.command(cls=Verb)
def diff(
    first: OnePath,
    second: OnePath,
    everything: Annotated[
        bool, typer.Option("--all", help="show every tensor that differs, not only the first")
    ] = False,
) -> int:
    """Compare two checkpoints of any layouts; the exit status is 1 if they differ."""
    found = inspection.difference(*(find(path)[-1] for path in (first, second)))
    print("\n".join(found.lines(None if everything else inspection.SHOWN)))
    return 1 if found else 0


@app.command(cls=Verb)
def convert(
    source: Annotated[
        Path,
        Place("folder of weights, or of checkpoints or a run, of which the newest is used"),
    ],
    destination: Annotated[Path, Place("folder to create: path or URL")],
    source_format: Annotated[
        str | None,
        Choice(weights.OPEN, "format of the source; absent: detected from the files", "--from"),
    ] = None,
    target_format: Annotated[
        str | None,
        Choice(
            weights.FORMATS,
            ("format to write; absent: hf if the source is ours, else ours"),
            "--to",
        ),
    ] = None,
    model: Model = None,
    flavor: Flavor = None,
    recipe: Annotated[
        str | None,
        Text("RECIPE", "recipe of weights in the format dcp; absent: the matching flavor"),
    ] = None,
    dtype: Annotated[
        str | None, Choice(weights.DTYPES, "dtype of all weights; absent: each keeps its own")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="maximum size of a file; absent: 5GB")
    ] = None,
    with_optimizer: Annotated[
        bool,
        typer.Option(
            "--with-optimizer",
            help="also convert optimizer states and counters, so that the run can be resumed; "
            "between ours and dcp",
        ),
    ] = False,
    imports: Imports = None,
) -> None:
    """Write weights, or a run, in another format: ours, Hugging Face's, Meta's, or TorchTitan's."""
    import_modules(imports or (), "--imports")
    options = weights.ConvertOptions(
        source_format=source_format,
        target_format=target_format,
        model=model,
        flavor=flavor,
        recipe=_in_effect(recipe) if recipe else None,
        dtype=dtype,
        max_shard_size=max_shard_size,
        with_optimizer=with_optimizer,
    )
    weights.convert(source, destination, options, {"versions": versions()})


def _in_effect(recipe: str) -> dict[str, Any]:
    """A recipe by dotted keys; its tokenizer need not be here."""
    read = load_job(recipe, [], None, "cpu", exempt={"model.tokenizer_path"})
    for notice in read.notices:
        logger.info("note: %s", notice)
    return read.config.in_effect()
