"""Data files that are deleted or truncated while they are read: an error that names the file."""

import gzip
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests import token_shards
from torchtitan.config import ConfigError
from torchtitan.data import DataConfig, open_source
from torchtitan.data.tokens.index import TokenDocuments

KINDS = {"text": "a.txt", "jsonl": "a.jsonl", "compressed": "a.jsonl.gz", "parquet": "a.parquet"}


def write(file: Path) -> None:
    texts = ["document"] * 100
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=10)
    else:
        file.write_bytes(gzip.compress(lines.encode()) if file.suffix == ".gz" else lines.encode())


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_deleted(kind: str, tmp_path: Path) -> None:
    files = [tmp_path / KINDS[kind].replace("a.", f"{name}.") for name in "abc"]
    for file in files:
        write(file)
    config = DataConfig(dataset=str(tmp_path), shuffle=False)
    documents = open_source(config, None, seed=0).read({0: None}, 1)[0]
    next(documents)
    for file in files[1:]:
        file.unlink()
    with pytest.raises(ConfigError, match=f"{files[1].name}.*No such file"):
        list(itertools.islice(documents, 400))


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_text_that_is_truncated(kind: str, tmp_path: Path) -> None:
    """A mapped file would end the process by a signal."""
    write(file := tmp_path / KINDS[kind])
    config = DataConfig(dataset=str(file), shuffle=False, document_bytes=100)
    documents = open_source(config, None, seed=0).read({0: None}, 1)[0]
    next(documents)
    os.truncate(file, 1000)
    with pytest.raises(ConfigError, match=rf"{file.name}: byte 1,000: the file ends here"):
        list(itertools.islice(documents, 400))


def test_shards_that_are_deleted_or_truncated(tmp_path: Path) -> None:
    written = [np.arange(100) for _ in range(30)]
    folder = token_shards.write_shards(tmp_path / "web", written)
    documents = TokenDocuments(folder, folder, 256)
    for document in (0, 10):
        documents.read(document)
    os.truncate(folder / "shard-00000.tokens", 310)
    documents.read(0)
    with pytest.raises(ConfigError, match=r"shard-00000.tokens: byte 310: the file ends here"):
        documents.read(1)
    (folder / "shard-00001.tokens").unlink()
    assert (documents.read(11) == written[11]).all()  # it is open
    (folder / "shard-00002.tokens").unlink()
    with pytest.raises(ConfigError, match=r"shard-00002.tokens: cannot be read: .*No such file"):
        documents.read(20)
    again = TokenDocuments(folder, folder, 256)
    with pytest.raises(ConfigError, match=r"shard-00000.tokens: has 310 bytes; wanted 2,000"):
        again.read(0)
