"""Memory that reading takes: python -m tests.resident_memory FOLDER ..., in its own process."""

import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.token_shards import token_streams
from torchtitan.data import DataConfig, open_source

SAMPLES = 1000


def anonymous():
    """Return the resident bytes of this process that belong to no file."""
    gc.collect()
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def read(folder):
    """Read samples of tokens, or lines of text, in a shuffled order; return what is open."""
    config = DataConfig(dataset=folder, num_workers=0)
    stream: Iterator[Any]
    if (Path(folder) / "index.json").exists():
        (stream,) = token_streams(config, 1, batch=1, seq_len=64)
    else:
        (stream,) = open_source(config, None, seed=0).read({0: None}, 1).values()
    for _ in range(SAMPLES):
        next(stream)
    return stream


if __name__ == "__main__":
    opened = []
    for folder in sys.argv[1:]:
        before = anonymous()
        opened.append(read(folder))
        print(anonymous() - before)
