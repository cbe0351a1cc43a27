"""`torchtitan data convert`: shards of one format written in another."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from torchtitan.config import ConfigError
from torchtitan.data import load_tokenizer
from torchtitan.data.tokens.checksums import in_order, record_all
from torchtitan.data.tokens.formats import TOKEN_FORMATS, TokenFormat, Tokens
from torchtitan.data.tokens.index import DTYPES, TokenDocuments, checksum
from torchtitan.data.tokens.index_cache import index_folder, open_tokens
from torchtitan.tools.data.shard_options import (
    FORMATS,
    Cache,
    Format,
    Processes,
    Settings,
    Shards,
    TokenizerPath,
    all_cores,
    byte_bar,
    format_class,
    format_of,
)
from torchtitan.tools.options import Choice, Imports, Text

ANY_TOKEN = 2**63
"""Limit of tokens whose tokenizer is not known."""


@dataclass(frozen=True)
class ShardJob:
    """Shard to write, of consecutive documents."""

    root: Path
    index: Path
    vocab_size: int
    target: TokenFormat
    folder: Path
    number: int
    dtype: str
    first: int
    end: int


def convert(
    source: Shards,
    output: Annotated[Path, typer.Argument(help="Folder to create.")],
    to: Annotated[str, Text(FORMATS, "Format to write (default: torchtitan).")] = "torchtitan",
    format: Format = "auto",
    settings: Settings = None,
    dtype: Annotated[
        str | None,
        Choice(DTYPES, "Dtype of the tokens (default: the source's, or what the format has)."),
    ] = None,
    cache: Cache = None,
    tokenizer: TokenizerPath = None,
    processes: Processes = None,
    imports: Imports = None,
) -> None:
    """Write shards in another format, and verify what was written."""
    found = format_of(source, format, settings, imports)
    target = format_class(to, "--to")()
    if not target.dtypes:
        writable = ", ".join(name for name in TOKEN_FORMATS if TOKEN_FORMATS[name].dtypes)
        raise ConfigError(f"--to {to}: cannot be written; use one of {writable}")
    if output.exists():
        raise ConfigError(f"{output}: it exists; give a folder that does not")
    loaded = load_tokenizer(tokenizer)
    limit = loaded.vocab_size if tokenizer else ANY_TOKEN
    documents = open_tokens(source, found, loaded, limit, cache)
    about = documents.description
    if not about.documents:
        raise ConfigError(f"{source}: it has no documents to convert")
    dtype = dtype or _nearest(about.shards[0].dtype, target)
    if dtype not in target.dtypes:
        raise ConfigError(f"--dtype {dtype}: {to} has {', '.join(target.dtypes)}")
    unfinished = output.with_name(f"{output.name}.unfinished")
    index = index_folder(source, found, loaded, cache)
    ends = np.cumsum(documents.lengths(np.arange(len(documents)))) * np.dtype(dtype).itemsize
    jobs = [
        ShardJob(documents.root, index, limit, target, unfinished, number, dtype, *span)
        for number, span in enumerate(_spans(ends, target.shard_bytes))
    ]
    described = {
        "tokenizer": about.tokenizer or (loaded.fingerprint if tokenizer else None),
        "vocab_size": about.vocab_size or (loaded.vocab_size if tokenizer else None),
        "add_bos": about.add_bos,
        "add_eos": about.add_eos,
        "source": about.source or str(source),
    }
    shutil.rmtree(unfinished, ignore_errors=True)
    processes = processes or all_cores()
    try:
        unfinished.mkdir(parents=True)
        with byte_bar("converting", int(ends[-1])) as advance:
            entries, written = [], []
            for job, (entry, checksums) in zip(
                jobs, in_order(processes, _write, jobs), strict=True
            ):
                entries.append(entry)
                written.append(checksums)
                advance(int(ends[job.end - 1] - (ends[job.first - 1] if job.first else 0)))
        target.finish(unfinished, entries, described)
        with byte_bar("verifying", int(ends[-1])) as advance:
            has_dtype = "dtype" in type(target).model_fields
            reader = target.model_copy(update={"dtype": dtype}) if has_dtype else target
            tables = record_all(unfinished, reader.tables(unfinished, loaded), processes, advance)
            read = [np.asarray(table.checksums) for table in tables]
    except OSError as error:
        raise ConfigError(f"{error.filename or output}: {error.strerror}") from None
    if not np.array_equal(np.concatenate(read), np.concatenate(written)):
        raise ConfigError(f"{unfinished}: what is read is not what was written; check the disk")
    unfinished.rename(output)
    print(
        f"{output}: {about.documents:,} documents, {about.tokens:,} tokens ({dtype}), "
        f"{len(jobs):,} shard{'s' * (len(jobs) > 1)}"
    )


def _nearest(dtype: str, target: TokenFormat) -> str:
    """Return the dtype of a format that is most like another."""
    size = np.dtype(dtype).itemsize
    return min(target.dtypes, key=lambda name: (name != dtype, abs(np.dtype(name).itemsize - size)))


def _spans(ends: Tokens, shard_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide documents into shards of about `shard_bytes`."""
    first = 0
    while first < len(ends):
        begin = int(ends[first - 1]) if first else 0
        end = int(np.searchsorted(ends, begin + shard_bytes, side="right"))
        yield first, max(end, first + 1)
        first = max(end, first + 1)


_opened = lru_cache(maxsize=1)(TokenDocuments)


def _write(job: ShardJob) -> tuple[Any, Tokens]:
    """Write a shard; return its entry and the checksums of its documents."""
    documents = _opened(job.root, job.index, job.vocab_size)
    checksums = []

    def converted() -> Iterator[Tokens]:
        limit = np.iinfo(job.dtype).max
        for number in range(job.first, job.end):
            tokens = documents.read(number)
            if len(tokens) and int(tokens.max()) > limit:
                raise ConfigError(
                    f"{documents.place(number)}: token {tokens.max()} is no {job.dtype}; give "
                    "another --dtype"
                )
            stored = tokens.astype(np.dtype(job.dtype).newbyteorder("<"))
            checksums.append(checksum(stored))
            yield stored

    entry = job.target.write(job.folder, job.number, job.dtype, converted())
    return entry, np.array(checksums, np.uint32)
