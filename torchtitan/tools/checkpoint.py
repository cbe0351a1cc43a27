"""Look at checkpoints, and convert weights from one format to another."""

from pathlib import Path
from typing import Annotated

import typer

from torchtitan.checkpoint import inspect
from torchtitan.checkpoint.weights import convert as weights
from torchtitan.logging import on_terminal
from torchtitan.provenance import versions
from torchtitan.tools.options import Choice, Flavor, Imports, Model, Verb, import_modules, verb

WHERE = "checkpoints (step-N), folders of them, or dump folders of runs"
Paths = Annotated[list[Path], typer.Argument(help=WHERE)]
OnePath = Annotated[Path, typer.Argument(help="a checkpoint; of a folder of them the newest")]

app = verb(help=__doc__)


@app.command("ls", cls=Verb)
def list_checkpoints(paths: Paths) -> None:
    """List checkpoints: step, layout, size, digest, and whether their files are there."""
    from rich.console import Console

    console = Console(width=None if on_terminal() else 200)
    console.print(inspect.table([p for folder in paths for p in inspect.find(folder)]))


@app.command(cls=Verb)
def verify(paths: Paths) -> int:
    """Read every byte of checkpoints, and say which are not what was saved."""
    damaged = 0
    for path in (p for folder in paths for p in inspect.find(folder)):
        problems = list(inspect.damage(path))
        damaged += bool(problems)
        print(*(problems or [f"{path}: what was saved, to the bit"]), sep="\n", flush=True)
    return 1 if damaged else 0


@app.command(cls=Verb)
def diff(first: OnePath, second: OnePath) -> int:
    """Compare two checkpoints of any layouts; the exit status is 1 if they differ."""
    found = inspect.difference(*(inspect.find(path)[-1] for path in (first, second)))
    print("\n".join(found.lines()))
    return 1 if found else 0


@app.command(cls=Verb)
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="folder of weights; of a folder of checkpoints, or of a run, the newest"
        ),
    ],
    destination: Annotated[Path, typer.Argument(help="folder to make")],
    source_format: Annotated[
        str | None, Choice(weights.FORMATS, "absent: by the files", "--from")
    ] = None,
    target_format: Annotated[
        str | None, Choice(weights.FORMATS, "absent: hf of ours, else ours", "--to")
    ] = None,
    model: Model = None,
    flavor: Flavor = None,
    dtype: Annotated[
        str | None, Choice(weights.DTYPES, "of all weights; absent: each keeps its own")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="of a file; absent: 5GB")
    ] = None,
    imports: Imports = None,
) -> None:
    """Write weights in another format: a checkpoint of ours, Hugging Face's, or Meta's."""
    import_modules(imports or (), "--imports")
    options = weights.ConvertOptions(
        source_format=source_format,
        target_format=target_format,
        model=model,
        flavor=flavor,
        dtype=dtype,
        max_shard_size=max_shard_size,
    )
    weights.convert(source, destination, options, {"versions": versions()})
