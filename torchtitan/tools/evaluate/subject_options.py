"""Options that say what is evaluated, and on what."""

from pathlib import Path
from typing import Annotated

import typer

from torchtitan.checkpoint.remote import location
from torchtitan.checkpoint.weights.extras import BYTES
from torchtitan.checkpoint.weights.opening import OPEN
from torchtitan.tools.evaluate.subject import DTYPES
from torchtitan.tools.options import Choice, Count, Text

WHERE = "a run's folder, a checkpoint, or a folder of Hugging Face's or Meta's weights"
Source = Annotated[Path, typer.Argument(parser=location, help=WHERE)]
Format = Annotated[
    str | None, Choice(OPEN, ("format of the source; absent: detected from the files"), "--from")
]
Tokenizer = Annotated[
    str | None, Text("PATH", f"file, folder, or {BYTES}; absent: that of the source")
]
TensorParallel = Annotated[int, Count("number of local ranks; absent: 1")]
Dtype = Annotated[
    str | None,
    Choice(DTYPES, ("dtype of computation; absent: that of training, or of the weights")),
]
BatchSize = Annotated[int, Count("number of texts computed together; absent: 8")]
