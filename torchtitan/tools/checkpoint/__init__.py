"""Look at checkpoints, and convert weights from one format to another."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from torchtitan.checkpoint.weights import conversion as weights
from torchtitan.checkpoint.weights.opening import find
from torchtitan.checks import load_job
from torchtitan.logging import logger, make_console, on_terminal
from torchtitan.provenance import versions
from torchtitan.remote import location
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

WHERE = "Checkpoints (step-N), folders of them, or folders of runs: paths or URLs."


def Place(help: str) -> Any:
    """An argument that is a path or a URL."""
    return typer.Argument(parser=location, help=help)


Paths = Annotated[list[Path], Place(WHERE)]
OnePath = Annotated[Path, Place("Checkpoint, or a folder whose newest is used: path or URL.")]

app = verb(help=__doc__)


@app.command("ls", cls=Verb)
def list_checkpoints(paths: Paths) -> None:
    """List checkpoints: step, layout, size, digest, and whether their files are there.

    Of a run's frequent checkpoints it lists what is on this node.
    """
    # Without a terminal every checkpoint has one line, whatever the length of its path.
    console = make_console(width=None if on_terminal(sys.stdout) else 10_000)
    console.print(inspection.table([p for folder in paths for p in find(folder, True)]))


@app.command(cls=Verb)
def verify(paths: Paths) -> int:
    """Read every byte of checkpoints, and report those that differ from what was saved.

    Of a run's frequent checkpoints it reads what is on this node.
    """
    damaged = 0
    for path in (p for folder in paths for p in find(folder, frequent=True)):
        is_sound, lines = inspection.verify(path)
        damaged += not is_sound
        print(*lines, sep="\n", flush=True)
    return 1 if damaged else 0


@app.command(cls=Verb)
def diff(
    first: OnePath,
    second: OnePath,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every tensor that differs, not only the first ones.")
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
        Place("Folder of weights, or of checkpoints or a run, whose newest is used: path or URL."),
    ],
    destination: Annotated[Path, Place("Folder to create: path or URL.")],
    source_format: Annotated[
        str | None,
        Choice(weights.OPEN, "Format of the source (default: detected from the files).", "--from"),
    ] = None,
    target_format: Annotated[
        str | None,
        Choice(
            weights.FORMATS,
            ("Format to write (default: hf if the source is ours, otherwise ours)."),
            "--to",
        ),
    ] = None,
    model: Model = None,
    flavor: Flavor = None,
    recipe: Annotated[
        str | None,
        Text("RECIPE", "Recipe of weights in the format dcp (default: the matching flavor)."),
    ] = None,
    dtype: Annotated[
        str | None, Choice(weights.DTYPES, "Dtype of all weights (default: each keeps its own).")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum size of a file (default: 5GB).")
    ] = None,
    with_optimizer: Annotated[
        bool,
        typer.Option(
            "--with-optimizer",
            help=(
                "Also convert optimizer states and counters, so that the run can be resumed; "
                "between ours and dcp."
            ),
        ),
    ] = False,
    imports: Imports = None,
) -> None:
    """Convert weights, or a run, to our format, Hugging Face's, Meta's or TorchTitan's.

    For weights of Hugging Face or Meta it prints the section [model] of a recipe that starts from
    them, and writes it to model_section.toml in the new folder.
    """
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
    section = weights.convert(source, destination, options, {"versions": versions()})
    if section is not None:
        print(section, end="")


def _in_effect(recipe: str) -> dict[str, Any]:
    """A recipe by dotted keys; its tokenizer need not be here."""
    read = load_job(recipe, [], None, "cpu", exempt={"model.tokenizer_path"})
    for notice in read.notices:
        logger.info("note: %s", notice)
    return read.config.in_effect()
