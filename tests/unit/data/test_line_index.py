"""The lines of a file, indexed once."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from torchtitan.data import DataConfig, line_index, load_tokenizer, open_source
from torchtitan.data.discovery import find_files
from torchtitan.data.line_index import line_starts

CONTENT = b'\n{"text": "a"}\n\r\n{"text": "b"}\r\n\n' + b'{"text": "c"}\n' * 50


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were indexed; all are large enough to be cached, and read in blocks."""
    files: list[Path] = []
    blocks = line_index._blocks
    monkeypatch.setattr(line_index, "CACHED_BYTES", 1)
    monkeypatch.setattr(line_index, "BLOCK", 7)
    monkeypatch.setattr(line_index, "_blocks", lambda path: (files.append(path), blocks(path))[1])
    return files


def expected(content: bytes) -> list[int]:
    places = [0, *(i + 1 for i, byte in enumerate(content) if byte == ord("\n"))]
    return [i for i in places if content[i : i + 1] not in (b"", b"\n", b"\r")]


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_an_index_is_built_once_and_after_a_change(
    is_elsewhere: bool, tmp_path: Path, built: list[Path]
) -> None:
    path = tmp_path / "data" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    cache = tmp_path / "cache" if is_elsewhere else None
    for _ in range(2):
        found = line_starts(path, cache)
        assert isinstance(found, np.memmap)  # of a file, so it takes no memory
        assert found.tolist() == expected(CONTENT)
    assert built == [path]
    assert (path.parent / ".torchtitan").exists() != is_elsewhere
    assert find_files(path.parent, None) == ([path], "jsonl")
    path.write_bytes(b"\n" + CONTENT[1:])
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    line_starts(path, cache)
    path.write_bytes(CONTENT[:-14])
    assert line_starts(path, cache).tolist() == expected(CONTENT[:-14])
    assert built == [path] * 3


def test_an_index_that_cannot_be_written_is_in_memory(tmp_path: Path, built: list[Path]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(CONTENT)
    (tmp_path / ".torchtitan").write_text("no folder")
    assert line_starts(path).tolist() == expected(CONTENT)
    assert built == [path]


def test_the_setting_names_the_folder(tmp_path: Path, built: list[Path]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some text"}) + "\n")
    config = DataConfig(dataset=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache"))
    open_source(config, load_tokenizer(None), seed=0)
    assert len(list((tmp_path / "cache").glob("lines-a.jsonl-*.i64"))) == 1
    assert not (tmp_path / ".torchtitan").exists()
