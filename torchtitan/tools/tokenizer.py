"""Train tokenizers."""

from typing import Annotated

from torchtitan.data import train_tokenizer
from torchtitan.tools.options import Dataset, DatasetPath, Text, Verb, verb

app = verb(help=__doc__)


@app.callback()
def tokenizer() -> None:
    """A group, although it has one verb only."""


@app.command(cls=Verb)
def train(
    output: Annotated[str, Text("FILE", "File to write: tokenizer.json.")],
    dataset: Dataset = "python_stdlib",
    dataset_path: DatasetPath = None,
    text_key: Annotated[str, Text("KEY", "Column or key of the text (default: text).")] = "text",
    documents: Annotated[
        int | None, Text("N", "Number of documents to read (default: all).")
    ] = None,
    vocab_size: Annotated[
        int, Text("N", "Size of the vocabulary, special tokens included (default: 2048).")
    ] = 2048,
    seed: Annotated[int, Text("N", "Seed of the selection with --documents (default: 0).")] = 0,
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
