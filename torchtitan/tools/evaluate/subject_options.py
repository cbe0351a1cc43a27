"""Options that say what is evaluated, and on what."""

from pathlib import Path
from typing import Annotated, Any

import typer

from torchtitan.checkpoint.weights.extras import BYTES
from torchtitan.checkpoint.weights.opening import OPEN
from torchtitan.remote import location
from torchtitan.tools.evaluate.subject import DTYPES
from torchtitan.tools.options import Choice, Count, Text, Verb


class ConvertVerb(Verb):
    """A verb that takes the settings of `[[convert]]`, too, as flags: they are `ctx.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own, flags = list[str](), list[str]()
        words = own
        for word in args:
            if word.startswith("--"):
                words = flags if word.startswith("--convert.") else own
            words.append(word)
        super().parse_args(ctx, own)
        ctx.args = flags
        return flags


WHERE = "Folder of a run, a checkpoint, or a folder of weights of Hugging Face or Meta."
Source = Annotated[Path, typer.Argument(parser=location, help=WHERE)]
Format = Annotated[
    str | None, Choice(OPEN, "Format of the source (default: detected from the files).", "--from")
]
Tokenizer = Annotated[
    str | None, Text("PATH", f"File, folder, or {BYTES} (default: that of the source).")
]
Dtype = Annotated[
    str | None,
    Choice(DTYPES, "Dtype of computation (default: that of training, or of the weights)."),
]
BatchSize = Annotated[int, Count("Number of texts in a batch (default: 8).")]
NoConvert = Annotated[
    bool,
    typer.Option(
        "--no-convert",
        help="Apply no converter of the recipe; --convert.0.name NAME applies others instead.",
    ),
]
