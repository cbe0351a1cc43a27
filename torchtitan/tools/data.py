"""Make, index and verify shards of tokens; inspect the data of recipes and runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from pydantic import ValidationError

from torchtitan.config import ConfigError, allowed_names, counted, import_modules, print_message
from torchtitan.data import DataConfig, check_local, load_tokenizer
from torchtitan.data.file_cache import reading
from torchtitan.data.tokenizer import Tokenizer, separator_note
from torchtitan.data.tokens.formats import TOKEN_FORMATS, TokenFormat, root_of
from torchtitan.data.tokens.index import (
    ARRAYS,
    INDEX,
    IndexDescription,
    ShardTable,
    TokenDocuments,
    read_tables,
    write_index,
)
from torchtitan.data.tokens.index_cache import (
    find_format,
    index_folder,
    open_tokens,
    record_all,
    wrong_digests,
)
from torchtitan.data.tokens.tokenizing import SHARD_TOKENS, tokenize
from torchtitan.logging import progress_bar, tell
from torchtitan.remote import RemotePath, location
from torchtitan.tools.inspect import inspect_samples
from torchtitan.tools.ledger import ledger
from torchtitan.tools.options import (
    Choice,
    Count,
    Dataset,
    DatasetPath,
    Flag,
    Imports,
    Processes,
    RecipeVerb,
    Text,
    TokenizerPath,
    Verb,
    all_cores,
    verb,
)

SHOWN = 20
"""Number of differences that are printed."""
FORMATS = " | ".join(TOKEN_FORMATS)

Shards = Annotated[Path, typer.Argument(help="Folder of shards, or the file of one.")]
ShardsAnywhere = Annotated[
    Path, typer.Argument(parser=location, help="Folder of shards, or the file of one: path or URL.")
]
Format = Annotated[
    str, Text(FORMATS, "Format of the shards (default: found from the files).", "--format")
]
Settings = Annotated[
    list[str] | None,
    Text("KEY=VALUE...", "Settings of the format: data.format.KEY in a recipe.", "--set"),
]
Cache = Annotated[
    Path | None, Text("FOLDER", "Folder of indices, data.cache (default: beside the data).")
]


def _amounts(about: IndexDescription) -> str:
    return f"{counted(about.documents, 'document')}, {counted(about.tokens, 'token')}"


@reading()
def index(
    path: ShardsAnywhere,
    format: Format = "auto",
    settings: Settings = None,
    cache: Cache = None,
    tokenizer: TokenizerPath = None,
    processes: Processes = None,
    imports: Imports = None,
) -> None:
    """Build the index of shards, with checksums of their tokens, before a run needs it."""
    found = format_of(path, format, settings, imports)
    loaded = load_tokenizer(tokenizer)
    root, processes = root_of(path), processes or all_cores()
    if isinstance(root, RemotePath):
        total, processes = sum(root.sizes().values()), 1  # which fetches one after the other
    else:
        total = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
        for damage in wrong_digests(found.digests(path)):
            raise ConfigError(damage)
    with byte_bar("reading", total) as advance:
        record = partial(record_all, processes=processes, advance=advance)
        about = open_tokens(
            path, found, loaded, loaded.vocab_size, cache, record=record
        ).description
    print(f"{path}: {_amounts(about)}, with checksums")


@reading()
def verify(
    path: Shards,
    format: Format = "auto",
    settings: Settings = None,
    cache: Cache = None,
    tokenizer: TokenizerPath = None,
    processes: Processes = None,
    imports: Imports = None,
) -> int:
    """Read all shards, and compare them with their index; the exit status is 1 if they differ."""
    found = format_of(path, format, settings, imports)
    loaded = load_tokenizer(tokenizer)
    index = index_folder(path, found, loaded, cache)
    if not (index / INDEX).is_file():
        raise ConfigError(f"{path}: no index to compare with; run `torchtitan data index {path}`")
    recorded = TokenDocuments(root_of(path), index, 2**63)
    about = recorded.description
    if about.content is None:
        raise ConfigError(
            f"{index}: without checksums, only the structure could be verified; run `torchtitan "
            f"data index {path}` while the data is known to be right"
        )
    with byte_bar("verifying", sum(shard.bytes for shard in about.shards)) as advance:
        found_differences = differences(
            path, found, loaded, index, recorded, processes or all_cores(), advance
        )
        lines = list(islice(found_differences, SHOWN))
    for line in lines:
        print(line)
    if not lines:
        print(f"{path}: {_amounts(about)}: as recorded")
    return 1 if lines else 0


def differences(
    path: Path,
    format: TokenFormat,
    tokenizer: Tokenizer,
    index: Path,
    recorded: TokenDocuments,
    processes: int,
    advance: Callable[[int], object],
) -> Iterator[str]:
    """Build the index again, and yield its differences from the recorded one."""
    with TemporaryDirectory() as folder:
        again = Path(folder)
        try:
            tables = format.tables(path, tokenizer)
            about = write_index(
                again, format.name, record_all(root_of(path), tables, processes, advance)
            )
        except ConfigError as error:
            yield str(error)
            return
        yield from wrong_digests(format.digests(path))
        count = 0
        for old, new in zip_longest(read_tables(index), read_tables(again)):
            if old is None or new is None or old.file != new.file:
                names = (each.file if each else "none" for each in (old, new))
                yield f"{recorded.root}: the next shard was {' and is now '.join(names)}"
                return
            for number in _wrong(old, new):
                start = (old if number < len(old.starts) else new).starts[number]
                count += 1
                yield (
                    f"{recorded.root / old.file}: document {number}, byte {start:,}: it is not as "
                    "it was recorded"
                )
        found, known = (
            replace(each, tokenizer=None, vocab_size=None, add_bos=None, add_eos=None, source=None)
            for each in (about, recorded.description)
        )
        if not count and found != known:
            yield f"{index / INDEX}: byte 0: it is not that of the documents"


def _wrong(old: ShardTable, new: ShardTable) -> list[int]:
    """Return the documents that differ; after them, the first that is in one of the tables."""
    both = min(len(old.starts), len(new.starts))
    different = np.zeros(both, np.bool_)
    for name in ARRAYS:
        different |= getattr(old, name)[:both] != getattr(new, name)[:both]
    return [*np.flatnonzero(different).tolist(), *[both] * (len(old.starts) != len(new.starts))]


def format_of(
    path: Path, name: str, settings: Sequence[str] | None, imports: Sequence[str] | None
) -> TokenFormat:
    """Return the format of the shards at `path`, with some settings, KEY=VALUE."""
    import_modules(imports or (), "--imports")
    if name not in TOKEN_FORMATS:
        raise ConfigError(f"--format: got {name}; {allowed_names(name, TOKEN_FORMATS)}")
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder")
    found = find_format(path, TOKEN_FORMATS[name]())
    if found is None:
        raise ConfigError(f"{path}: no shards of tokens; give their format by --format")
    values = dict(setting.partition("=")[::2] for setting in settings or ())
    try:
        return type(found).model_validate_strings({"name": found.name, **values})
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise ConfigError(
            f"--set {key}: {fault['msg']}; the settings of {found.name} are "
            f"{', '.join(type(found).model_fields)}"
        ) from None


@contextmanager
def byte_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """On a terminal, a bar that the yielded function advances by some bytes."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with progress_bar(what, total, *columns) as show:
        yield lambda size: show(advance=size)


def tokenize_text(
    output: Annotated[Path, Text("FOLDER", "Folder to write.", parser=location)],
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
        bool | None, Flag("--bos/--no-bos", "Start documents by BOS, data.add_bos.")
    ] = None,
    add_eos: Annotated[
        bool | None, Flag("--eos/--no-eos", "End documents by EOS, data.add_eos.")
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
    if isinstance(output, RemotePath):
        raise ConfigError(f"--output: got {output}; wanted a folder on a disk, to upload after it")
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
    config = DataConfig.model_validate(settings)
    check_local(config)
    loaded = load_tokenizer(tokenizer)
    if note := separator_note(loaded, add_bos, add_eos):
        print_message("note", note)
    try:
        about = tokenize(
            config,
            loaded,
            output,
            processes=processes or all_cores(),
            max_tokens=max_tokens,
            shard_tokens=shard_tokens or SHARD_TOKENS,
            show_progress=True,
        )
    except KeyboardInterrupt:
        tell(f"stopped; the same command continues ({output})")
        return 130
    print(f"{output}: {_amounts(about)}, {counted(len(about.shards), 'shard')}")
    return 0


app = verb(help=__doc__)

app.command("tokenize", cls=Verb)(tokenize_text)
app.command("index", cls=Verb)(index)
app.command("verify", cls=Verb)(verify)
app.command("inspect", cls=RecipeVerb)(inspect_samples)
app.command("ledger", cls=Verb)(ledger)
