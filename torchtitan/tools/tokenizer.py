"""Train tokenizers."""

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
    output: Annotated[str, typer.Option(metavar="FILE", help="File to write: tokenizer.json.")],
    dataset: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Name of a data set of text, or a path (default: python_stdlib)."
        ),
    ] = ("python_stdlib"),
    dataset_path: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="File or folder of a data set that needs one."),
    ] = None,
    text_key: Annotated[
        str, typer.Option(metavar="KEY", help="Column or key of the text (default: text).")
    ] = "text",
    documents: Annotated[
        int | None, typer.Option(metavar="N", help="Number of documents to read (default: all).")
    ] = None,
    vocab_size: Annotated[
        int,
        typer.Option(
            metavar="N", help="Size of the vocabulary, special tokens included (default: 2048)."
        ),
    ] = 2048,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the selection with --documents (default: 0).")
    ] = 0,
) -> None:
    """Train a byte-level BPE tokenizer on the documents of a data set."""
    train_tokenizer(
        dataset,
        dataset_path,
        vocab_size=vocab_size,
        output=output,
        documents=documents,
        text_key=text_key,
        seed=seed,
    )
