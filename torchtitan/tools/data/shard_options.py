"""Options of the verbs that read shards of tokens, and their progress bar."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from torchtitan.config import ConfigError, allowed_names
from torchtitan.data.tokens.formats import TOKEN_FORMATS, TokenFormat
from torchtitan.data.tokens.index_cache import find_format
from torchtitan.logging import progress_bar
from torchtitan.remote import location
from torchtitan.tools.options import Count, Text, import_modules

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
TokenizerPath = Annotated[
    str | None, Text("PATH", "Tokenizer, model.tokenizer_path (default: bytes).", "--tokenizer")
]
Processes = Annotated[int | None, Count("Number of processes (default: all cores).")]


def format_class(name: str, flag: str = "--format") -> type[TokenFormat]:
    """Return the format that an option names."""
    if name not in TOKEN_FORMATS:
        raise ConfigError(f"{flag}: got {name}; {allowed_names(name, TOKEN_FORMATS)}")
    return TOKEN_FORMATS[name]


def format_of(
    path: Path, name: str, settings: Sequence[str] | None, imports: Sequence[str] | None
) -> TokenFormat:
    """Return the format of the shards at `path`, with some settings, KEY=VALUE."""
    import_modules(imports or (), "--imports")
    named = format_class(name)
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder")
    found = find_format(path, named())
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


def all_cores() -> int:
    """Return the number of processes that can run at the same time."""
    return len(os.sched_getaffinity(0))


@contextmanager
def byte_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """On a terminal, a bar that the yielded function advances by some bytes."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with progress_bar(what, total, *columns) as show:
        yield lambda size: show(advance=size)
