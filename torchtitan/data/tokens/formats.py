"""Formats of shards of tokens: how each finds the documents in its files.

A format is the settings class of `[data.format]`; `name = "auto"` takes the first that recognizes
the files. To read the shards of other software, add its class to `TOKEN_FORMATS`. A format that can
also be written, by `torchtitan data convert`, has `dtypes` and `write`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy.typing as npt

from torchtitan.config import Config, Registry
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.tokens.index import (
    DTYPES,
    INDEX,
    ShardTable,
    ShardWriter,
    read_tables,
    write_index,
)
from torchtitan.data.tokens.shard_files import indices

Tokens = npt.NDArray[Any]


class TokenFormat(Config):
    """Format of shards of tokens."""

    name: str = "auto"
    """Format; auto: found from the files."""

    dtypes: ClassVar[Sequence[str]] = ()
    """Dtypes that it can store, the preferred ones first; none if it cannot be written."""
    shard_bytes: ClassVar[int] = 2**30
    """Approximate size of the shards that are written."""

    def files(self, path: Path) -> list[Path]:
        """Return the files at `path` that determine the documents; none if it has another format.

        An index is built again if the size or the time of modification of one of them changes.
        """
        return []

    def resolved(self, tokenizer: Tokenizer) -> Self:
        """Return the format with the settings that follow from the tokenizer."""
        return self

    def tables(self, path: Path, tokenizer: Tokenizer) -> Iterator[ShardTable]:
        """Find the documents of each shard; `ShardTable.file` is relative to `root_of(path)`.

        Args:
            tokenizer: the model's, for formats that do not say what ends a document or what dtype
                tokens have.

        Raises:
            ConfigError: if a file is damaged, with the file and byte.
        """
        raise NotImplementedError

    def digests(self, path: Path) -> Iterator[tuple[Path, Mapping[str, str]]]:
        """Yield each file whose digests the format records, with them by algorithm."""
        return iter(())

    def write(self, folder: Path, number: int, dtype: str, documents: Iterable[Tokens]) -> Any:
        """Write one shard of some documents, of this dtype; return an entry for `finish`."""
        raise NotImplementedError

    def finish(self, folder: Path, entries: Sequence[Any], about: Mapping[str, Any]) -> None:
        """Write what describes all shards.

        Args:
            about: fields of `IndexDescription` that are known.
        """


def root_of(path: Path) -> Path:
    """Return the folder of the shards at `path`, a folder or a file."""
    return path if path.is_dir() else path.parent


class OwnFormat(TokenFormat):
    """Shards of `torchtitan data tokenize` and `convert`: the index is next to them."""

    name: str = "torchtitan"
    """Name of the format."""

    dtypes: ClassVar[Sequence[str]] = DTYPES

    def files(self, path: Path) -> list[Path]:
        return indices(path / INDEX, "fingerprint")

    def tables(self, path: Path, tokenizer: Tokenizer) -> Iterator[ShardTable]:
        return read_tables(path)

    def write(
        self, folder: Path, number: int, dtype: str, documents: Iterable[Tokens]
    ) -> ShardTable:
        writer = ShardWriter(folder / f"{number:05d}.tokens", dtype)
        for tokens in documents:
            writer.add(tokens)
        return writer.close()

    def finish(self, folder: Path, entries: Sequence[ShardTable], about: Mapping[str, Any]) -> None:
        write_index(folder, self.name, entries, **about)


TOKEN_FORMATS = Registry[type[TokenFormat]](
    "token_format",
    {
        "auto": TokenFormat,
        "torchtitan": OwnFormat,
        "megatron": "torchtitan.data.tokens.megatron:MegatronFormat",
        "mds": "torchtitan.data.tokens.mds:MosaicFormat",
        "datatrove": "torchtitan.data.tokens.datatrove:DatatroveFormat",
        "litdata": "torchtitan.data.tokens.litdata:LitDataFormat",
        "raw": "torchtitan.data.tokens.raw:RawFormat",
    },
)
"""Formats of shards by their name in recipes, in the order in which `auto` tries them."""
