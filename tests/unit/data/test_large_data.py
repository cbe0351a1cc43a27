"""Data of any size: memory does not grow with it, and files may be more than a process may open."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.token_shards import token_streams
from torchtitan.config import ConfigError
from torchtitan.data import DataConfig, documents, open_source
from torchtitan.data.file_cache import open_file
from torchtitan.data.tokens.index import ShardTable, write_index

MIB = 2**20
SAMPLES = 1000


def write_lines(folder, documents):
    folder.mkdir()
    lines = b"".join(b'{"text": "document %d"}\n' % number for number in range(documents))
    (folder / "lines.jsonl").write_bytes(lines)
    return folder


def write_shard(folder, documents, size):
    """Write documents of 10 tokens, 0, that are spread over a file with no other content."""
    folder.mkdir()
    shard = folder / "part.tokens"
    shard.touch()
    os.truncate(shard, size)
    starts = np.linspace(0, size - 20, documents).astype(np.uint64) & ~np.uint64(1)
    lengths = np.full(documents, 10, np.uint32)
    write_index(folder, "torchtitan", [ShardTable(shard.name, size, "uint16", starts, lengths)])
    return folder


def write_many(folder, files):
    """Write shards of a document each."""
    folder.mkdir()
    tables = []
    for number in range(files):
        shard = folder / f"{number:04d}.tokens"
        shard.write_bytes(bytes(20))
        start, length = np.zeros(1, np.uint64), np.full(1, 10, np.uint32)
        tables.append(ShardTable(shard.name, 20, "uint16", start, length))
    write_index(folder, "torchtitan", tables)
    return folder


def write_many_lines(folder, files):
    folder.mkdir()
    for number in range(files):
        (folder / f"{number:04d}.jsonl").write_bytes(b'{"text": "document"}\n')
    return folder


def anonymous():
    """The resident bytes of this process that belong to no file."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


def read(folder):
    """Read samples of tokens, or lines of text, in a shuffled order; what is open."""
    config = DataConfig(dataset=folder, num_workers=0)
    if (Path(folder) / "index.json").exists():
        (stream,) = token_streams(config, 1, batch=1, seq_len=64)
    else:
        (stream,) = open_source(config, None, seed=0).read({0: None}, 1).values()
    for _ in range(SAMPLES):
        next(stream)
    return stream


@pytest.fixture
def grown(tmp_path):
    """Bytes by which memory grew when each was read, by a process that may open 256 files."""
    folders = [
        write_lines(tmp_path / "first lines", 1000),  # fill caches
        write_shard(tmp_path / "first tokens", 1000, 20_000),
        write_lines(tmp_path / "few lines", 1000),
        write_lines(tmp_path / "many lines", 100_000),
        write_shard(tmp_path / "few tokens", 1000, 20_000),
        write_shard(tmp_path / "many tokens", 2_000_000, 40_000_000),
        write_shard(tmp_path / "sparse tokens", 2_000_000, 10**10),
        write_many(tmp_path / "many shards", 2500),
        write_many_lines(tmp_path / "many files", 2500),
    ]
    limited = ["bash", "-c", 'ulimit -n 256 && exec "$@"', "-"]
    command = [*limited, sys.executable, "-m", "tests.unit.data.test_large_data"]
    command += map(str, folders)
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found = map(int, done.stdout.split())
    return {folder.name: count for folder, count in zip(folders, found, strict=True)}


@pytest.mark.gate
@pytest.mark.costs("a new interpreter")
def test_memory_does_not_grow_with_the_data(grown):
    """Of 2 million documents of tokens, 8 bytes for each would be 16 MB."""
    assert grown["many lines"] < grown["few lines"] + 4 * MIB
    assert grown["many tokens"] < grown["few tokens"] + 4 * MIB
    assert grown["sparse tokens"] < grown["few tokens"] + 4 * MIB
    # More files than may be open.
    assert grown["many shards"] < 8 * MIB
    assert grown["many files"] < 8 * MIB


def test_indices_of_lines_keep_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "CACHED_BYTES", 1)
    monkeypatch.setattr(documents, "OPEN_FILES", 2)
    open_file.cache_clear()
    folder = write_many_lines(tmp_path / "lines", 30)
    others = {*os.listdir("/proc/self/fd")}  # which may be closed meanwhile
    found = documents.JsonlDocuments(sorted(folder.glob("*.jsonl")), "text", folder)
    assert len(list(folder.glob(".torchtitan/*.i64"))) == 30
    assert {*os.listdir("/proc/self/fd")} <= others
    for _ in range(2):
        assert [found[number] for number in range(30)] == ["document"] * 30
    assert len({*os.listdir("/proc/self/fd")} - others) <= 30 + 2  # the texts and two indices
    (folder / "0003.jsonl").write_bytes(b'{"text": "other"}\n' * 2)
    with pytest.raises(ConfigError, match=r"0003.jsonl: it has changed since the run"):
        found[3]
    (folder / "0004.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"0004.jsonl: cannot be read: .*No such file"):
        found[4]


if __name__ == "__main__":
    opened = []
    for folder in sys.argv[1:]:
        before = anonymous()
        opened.append(read(folder))
        print(anonymous() - before)
