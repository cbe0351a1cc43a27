"""`torchtitan data tokenize`: shards of tokens from any source of text."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from torchtitan.data import DataConfig, load_tokenizer
from torchtitan.data.tokens.tokenizing import SHARD_TOKENS, tokenize
from torchtitan.tools.options import (
    Choice,
    Count,
    Dataset,
    DatasetPath,
    Imports,
    Processes,
    Text,
    TokenizerPath,
    all_cores,
    import_modules,
)


def tokenize_text(
    output: Annotated[Path, Text("FOLDER", "Folder to write.")],
    dataset: Dataset = "python_stdlib",
    dataset_path: DatasetPath = None,
    text_key: Annotated[
        str, Text("KEY", "Column or key of the text, data.text_key (default: text).")
    ] = "text",
    null_text: Annotated[
        str, Choice(("error", "skip"), "A document without text, data.null_text (default: error).")
    ] = "error",
    document_bytes: Annotated[
        int | None, Count("Split of long text files, data.document_bytes (default: 65536).")
    ] = None,
    tokenizer: TokenizerPath = None,
    add_bos: Annotated[
        bool | None, typer.Option("--bos/--no-bos", help="Start documents by BOS, data.add_bos.")
    ] = None,
    add_eos: Annotated[
        bool | None, typer.Option("--eos/--no-eos", help="End documents by EOS, data.add_eos.")
    ] = None,
    processes: Processes = None,
    max_tokens: Annotated[
        int | None, Count("Maximum number of tokens; the documents after it are left out.")
    ] = None,
    shard_tokens: Annotated[
        int | None, Count(f"Tokens after which a shard is complete (default: {SHARD_TOKENS}).")
    ] = None,
    imports: Imports = None,
) -> int:
    """Tokenize text into shards; the same command continues after an interruption."""
    import_modules(imports or (), "--imports")
    settings: dict[str, Any] = {
        "dataset": dataset,
        "dataset_path": dataset_path,
        "text_key": text_key,
        "null_text": null_text,
        "add_bos": add_bos,
        "add_eos": add_eos,
    }
    if document_bytes is not None:
        settings["document_bytes"] = document_bytes
    try:
        about = tokenize(
            DataConfig.model_validate(settings),
            load_tokenizer(tokenizer),
            output,
            processes=processes or all_cores(),
            max_tokens=max_tokens,
            shard_tokens=shard_tokens or SHARD_TOKENS,
            show_progress=True,
        )
    except KeyboardInterrupt:
        print(f"stopped; the same command continues ({output})", file=sys.stderr)
        return 130
    shards = len(about.shards)
    print(
        f"{output}: {about.documents:,} documents, {about.tokens:,} tokens, "
        f"{shards} shard{'s' * (shards > 1)}"
    )
    return 0
