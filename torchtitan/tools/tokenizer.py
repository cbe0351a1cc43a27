"""Make tokenizers."""

from typing import Annotated

import typer

from torchtitan.data import train_tokenizer
from torchtitan.tools.options import Verb, verb

app = verb(help=__doc__)


@app.callback()
def tokenizer() -> None:
    """A group, although it has one verb only."""


@app.command(cls=Verb)
def train(
    output: Annotated[str, typer.Option(help="tokenizer.json to write")],
    dataset: Annotated[str, typer.Option(help="name of a data set of text, or a path")] = (
        "python_stdlib"
    ),
    dataset_path: Annotated[
        str | None, typer.Option(help="file or folder of a data set that needs one")
    ] = None,
    text_key: Annotated[str, typer.Option(help="column or key of the text")] = "text",
    documents: Annotated[
        int | None, typer.Option(help="number of documents to read; absent: all")
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="size of the vocabulary, special tokens included")
    ] = 2048,
    seed: Annotated[int, typer.Option(help="seed of the selection with --documents")] = 0,
) -> None:
    """Make a byte-level BPE tokenizer from the documents of a data set."""
    train_tokenizer(
        dataset,
        dataset_path,
        vocab_size=vocab_size,
        output=output,
        documents=documents,
        text_key=text_key,
        seed=seed,
    )
