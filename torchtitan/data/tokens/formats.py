"""Formats of shards of tokens: how each finds the documents in its files.

A format is the settings class of `[data.format]`; `name = "auto"` takes the first that recognizes
the files. To read the shards of other software, add its class to `TOKEN_FORMATS`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from torchtitan.config import Config, Registry
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.tokens.index import INDEX, ShardTable, read_tables
from torchtitan.data.tokens.shard_files import indices


class TokenFormat(Config):
    """Format of shards of tokens."""

    name: str = "auto"
    """Format; auto: found from the files."""

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


def root_of(path: Path) -> Path:
    """Return the folder of the shards at `path`, a folder or a file."""
    return path if path.is_dir() else path.parent


class OwnFormat(TokenFormat):
    """Shards of `torchtitan data tokenize`: the index is next to them."""

    name: str = "torchtitan"
    """Name of the format."""

    def files(self, path: Path) -> list[Path]:
        return indices(path / INDEX, "fingerprint")

    def tables(self, path: Path, tokenizer: Tokenizer) -> Iterator[ShardTable]:
        return read_tables(path)


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
