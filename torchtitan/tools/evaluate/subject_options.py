"""Options that say what is evaluated, and on what."""

from pathlib import Path
from typing import Annotated

import typer

from torchtitan.checkpoint.remote import location
from torchtitan.checkpoint.weights.opening import OPEN
from torchtitan.tools.evaluate.subject import BYTES, DTYPES
from torchtitan.tools.options import Choice, Count, Text

WHERE = "a run's folder, a checkpoint, or a folder of Hugging Face's or Meta's weights"
Source = Annotated[Path, typer.Argument(parser=location, help=WHERE)]
Format = Annotated[str | None, Choice(OPEN, "absent: by the files", "--from")]
Tokenizer = Annotated[
    str | None, Text("PATH", f"file, folder, or {BYTES}; absent: as the source says")
]
TensorParallel = Annotated[int, Count("ranks; absent: 1")]
Dtype = Annotated[str | None, Choice(DTYPES, "absent: that of training, or of the weights")]
BatchSize = Annotated[int, Count("texts together; absent: 8")]
