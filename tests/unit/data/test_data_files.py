"""Files of data: found through links, refused by name, and known by their content."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.token_shards import drawn_documents, write_format
from torchtitan.checkpoint.ranges import files_in, read_header
from torchtitan.checkpoint.weights.meta_files import _load
from torchtitan.checkpoint.weights.network import read_config
from torchtitan.config import ConfigError
from torchtitan.data import DataConfig, check_local, line_index, load_tokenizer, open_source
from torchtitan.data.discovery import walk
from torchtitan.data.file_cache import contents_of
from torchtitan.data.line_index import line_starts
from torchtitan.data.sources import ShuffledDocuments
from torchtitan.data.stream import refuse_other
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.data.tokens import mixed_sources
from torchtitan.data.tokens.formats import TOKEN_FORMATS
from torchtitan.data.tokens.index_cache import find_format, open_tokens
from torchtitan.data.tokens.tokenizing import tokenize
from torchtitan.remote import POINTER
from torchtitan.research.vit_mae.images.folders import ImageFolder
from torchtitan.research.vit_mae.images.settings import ImagesConfig
from torchtitan.research.vit_mae.images.tar_shards import shards_at
from torchtitan.tools.cli import main

LINES = [json.dumps({"text": f"document {n}"}) for n in range(12)]


def write(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix.lower() == ".gz" else content)
    return path


def epoch(path: Path, count: int, **settings: Any) -> list[str]:
    config = DataConfig(dataset=str(path), shuffle=False, **settings)
    documents = open_source(config, load_tokenizer(None), seed=0).read({0: None}, 1)[0]
    return [next(documents).content for _ in range(count)]


def images(path: Path) -> None:
    ImageFolder(path, (".jpg", ".jsonl"), ImagesConfig(), 3)


WALKS: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: check_local(DataConfig(dataset=str(path))),
    "tokens": lambda path: find_format(path, TOKEN_FORMATS["auto"]()),
    "images": images,
    "archives": shards_at,
}


def test_links_are_followed_and_a_circle_ends(tmp_path: Path) -> None:
    write(tmp_path / "data/a.jsonl", LINES[:2])
    write(tmp_path / "disk/b/c.jsonl", LINES[2:])
    (tmp_path / "data/b").symlink_to("../disk")
    (tmp_path / "data/c.jsonl").symlink_to("a.jsonl")
    (tmp_path / "disk/back").symlink_to("../data")
    (tmp_path / "disk/itself").symlink_to(".")
    names = [file.relative_to(tmp_path / "data").as_posix() for file in walk(tmp_path / "data")]
    assert names == ["a.jsonl", "b/b/c.jsonl", "c.jsonl"]
    assert len(set(epoch(tmp_path / "data", 14))) == 12


@pytest.mark.parametrize("name", WALKS)
def test_what_is_no_file_is_named_by_every_walk(name: str, tmp_path: Path) -> None:
    write(tmp_path / "one/a.jsonl", LINES)
    odd = tmp_path / "one/b.jsonl"
    odd.symlink_to("/nowhere/b.jsonl")
    with pytest.raises(
        ConfigError, match=r"one/b\.jsonl: it is a link to /nowhere/b\.jsonl, which"
    ):
        WALKS[name](tmp_path)
    odd.unlink()
    os.mkfifo(odd)
    with pytest.raises(ConfigError, match=r"one/b\.jsonl: it is neither a file nor a folder"):
        WALKS[name](tmp_path)


@pytest.mark.parametrize("name", WALKS)
def test_a_folder_that_cannot_be_read_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "one/a.jsonl", LINES)
    scandir = os.scandir

    def refused(path: str) -> Any:
        if str(path).endswith("one"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ConfigError, match="/one: cannot be read: Permission denied"):
        WALKS[name](tmp_path)


def test_no_error_of_the_disk_is_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", LINES)
    opened = np.memmap

    def refused(file: Path, *arguments: Any) -> Any:
        if Path(file) == path:
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, *arguments)

    monkeypatch.setattr(np, "memmap", refused)
    assert main(["data", "tokenize", "--dataset", str(path), "--output", str(tmp_path / "o")]) == 2
    assert f"{path}: cannot be read: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.JSONL", "a.Json", "a.jsonl.GZ", "a.JSONL.gz"])
def test_suffixes_in_any_case(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, LINES)
    assert epoch(tmp_path, 12) == [f"document {n}" for n in range(12)]


def test_tokens_in_capitals(tmp_path: Path) -> None:
    shards = write_format(tmp_path / "shards", "megatron", [drawn_documents(12)], "uint16")
    for file in list(shards.iterdir()):
        file.rename(file.with_suffix(file.suffix.upper()))
    found = open_tokens(shards, TOKEN_FORMATS["megatron"](), ByteTokenizer(), 258, tmp_path)
    assert len(found) == 12


@pytest.mark.parametrize("kind", [None, "text", "jsonl"])
@pytest.mark.parametrize("name", ["a.csv", "b/a.TSV", "data-0.arrow"])
def test_tables_are_never_text(name: str, kind: str | None, tmp_path: Path) -> None:
    write(tmp_path / name, ["id,text", "1,words"])
    if name.endswith("arrow"):
        write(tmp_path / "state.json", ["{"])
        write(tmp_path / "dataset_info.json", ["{"])
    chosen = {"dataset": kind, "dataset_path": str(tmp_path)} if kind else {}
    config = DataConfig.model_validate(chosen or {"dataset": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"files are not read; write the data as Parquet: python"):
        open_source(config, load_tokenizer(None), seed=0)


def test_the_advice_for_a_table_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": ["some words"] * 9}).save_to_disk("saved")
    with pytest.raises(ConfigError) as error:
        open_source(DataConfig(dataset="saved"), load_tokenizer(None), seed=0)
    exec(str(error.value).partition("python -c '")[2].removesuffix("'"))
    assert epoch(tmp_path / "saved.parquet", 9) == ["some words"] * 9


READERS: dict[str, Callable[[Path], Any]] = {
    "a.txt": lambda path: epoch(path, 1),
    "a.jsonl": lambda path: epoch(path, 1),
    "a.parquet": lambda path: epoch(path.parent, 1),
    "a.jsonl.gz": lambda path: epoch(path, 1),
    "a.idx": lambda path: find_format(path.parent, TOKEN_FORMATS["auto"]()),
    "a.npy": lambda path: find_format(path.parent, TOKEN_FORMATS["auto"]()),
    "a.tar": shards_at,
    "a.jpg": lambda path: images(path.parent),
    "tokenizer.json": lambda path: load_tokenizer(str(path)),
    "tokenizer.model": lambda path: load_tokenizer(str(path.parent)),
    "model.safetensors": lambda path: read_header(path, files_in(path.parent)),
    "config.json": read_config,
    "consolidated.00.pth": _load,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_of_git_lfs_is_named_as_such(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(POINTER + b"v1\noid sha256:%064d\nsize 12345678\n" % 7)
    with pytest.raises(
        ConfigError, match=rf"{name}: it is only the pointer of a file that Git LFS"
    ):
        READERS[name](path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("is_cached", [False, True])
def test_lines_of_blanks_are_no_documents(
    suffix: str, is_cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_index, "CACHED_BYTES", 1 if is_cached else 2**20)
    lines = ["", "   ", LINES[0], "\t\r", " " + LINES[1], "\r", "\r" + LINES[2] + "\r", "\v\f", " "]
    path = write(tmp_path / f"a.jsonl{suffix}", lines)
    check_local(DataConfig(dataset=str(path)))
    assert epoch(path, 4) == [f"document {n % 3}" for n in range(4)]


def nulls(kind: str, path: Path) -> Path:
    texts = ["zero", None, "two", None, "four"]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path / "a.parquet")
        return path / "a.parquet"
    return write(path / f"a.{kind}", [json.dumps({"text": text}) for text in texts])


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_null_is_an_error_of_the_check_or_skipped_and_counted(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = nulls(kind, tmp_path)
    with pytest.raises(ConfigError, match=r"'text' is null; set data\.null_text = \"skip\""):
        check_local(DataConfig(dataset=str(path)))
    with pytest.raises(ConfigError, match=r"(:2|row 2): 'text' is null"):
        epoch(path, 5)
    check_local(DataConfig(dataset=str(path), null_text="skip"))
    assert list(filter(None, epoch(path, 10, null_text="skip"))) == 2 * ["zero", "two", "four"]
    command = ["data", "tokenize", "--dataset", str(path), "--output", str(tmp_path / "out")]
    assert main([*command, "--processes", "1"]) == 2
    assert main([*command, "--processes", "2", "--null-text", "skip"]) == 0
    assert "3 documents" in capsys.readouterr().out


def test_skipped_nulls_are_a_metric(tmp_path: Path) -> None:
    from torchtitan.tasks import NextToken

    skip = DataConfig(dataset=str(nulls("jsonl", tmp_path)), null_text="skip")
    assert NextToken.left_out(skip) == "null_texts"
    assert NextToken.left_out(skip.model_copy(update={"null_text": "error"})) is None
    source = open_source(skip, load_tokenizer(None), seed=0)
    documents = source.read({0: None}, 1)[0]
    for _ in range(5):
        next(documents)
    assert isinstance(source, ShuffledDocuments)
    assert source.nulls is not None
    assert source.nulls.count == 2


def replace(path: Path, content: bytes) -> None:
    """Replace a file by another of the same size and time."""
    before = path.stat()
    assert len(content) == before.st_size
    path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_index_of_lines_notices_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_index, "CACHED_BYTES", 1)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"ab\ncdef\n")
    assert line_starts(path).tolist() == [0, 3]
    replace(path, b"abcd\nef\n")
    assert line_starts(path).tolist() == [0, 5]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_a_run_notices_another_file_and_one_of_before_resumes(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{kind}", LINES)
    config = DataConfig(dataset=str(path))
    saved = dict(open_source(config, load_tokenizer(None), seed=0).identity)
    content = path.read_bytes()
    replace(path, content[:-1] + bytes([content[-1] ^ 1]))
    own = open_source(config, load_tokenizer(None), seed=0).identity
    with pytest.raises(ConfigError, match="content was"):
        refuse_other(saved, own)
    del saved["content"]
    refuse_other(saved, own)


def test_the_index_of_tokens_notices_other_documents(tmp_path: Path) -> None:
    def lengths() -> list[int]:
        format = TOKEN_FORMATS["megatron"]()
        found = open_tokens(shards, format, ByteTokenizer(), 258, tmp_path / "cache")
        return found.lengths(np.arange(len(found))).tolist()

    documents = [np.arange(3, dtype=np.uint16), np.arange(5, dtype=np.uint16)]
    shards = write_format(tmp_path / "one", "megatron", [documents], "uint16")
    other = write_format(tmp_path / "other", "megatron", [documents[::-1]], "uint16")
    assert lengths() == [3, 5]
    stamps = next((tmp_path / "cache").glob("index-*/files.json"))
    with_digests = stamps.read_text()
    stamps.write_text(json.dumps([stamp[:3] for stamp in json.loads(with_digests)]))
    assert lengths() == [3, 5]  # an index of before is used, and has digests from now on
    assert stamps.read_text() == with_digests
    for file in other.iterdir():
        replace(shards / file.name, file.read_bytes())
    assert lengths() == [5, 3]


def test_many_files_are_known_by_some(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.txt", [str(n)]) for n in range(3)]
    assert contents_of(files) != contents_of(files[:2])
    assert contents_of(files * 2000) == contents_of(files * 2000)
    large = tmp_path / "large"
    large.write_bytes(bytes(2**20))
    before = contents_of([large])
    for place in (0, 2**19, 2**20 - 1):
        content = bytearray(2**20)
        content[place] = 1
        large.write_bytes(content)
        assert contents_of([large]) != before


def test_tokens_that_were_written_before_are_used_until_the_text_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", LINES)
    config, folder_of = DataConfig(dataset=str(path)), mixed_sources._folder
    folders: list[Path] = []

    def recorded(config: DataConfig, made_of: Any) -> Path:
        folders.append(folder_of(config, made_of))
        return folders[-1]

    monkeypatch.setattr(mixed_sources, "_folder", recorded)
    mixed_sources.folder_of_tokens(config, ByteTokenizer())
    earlier, own = folders
    tokenize(config, ByteTokenizer(), earlier, processes=1)
    settings = json.loads((earlier / "source.json").read_text())
    assert settings["source"].pop("content")
    (earlier / "source.json").write_text(json.dumps(settings))
    assert mixed_sources.folder_of_tokens(config, ByteTokenizer()) == earlier
    tokenize(config, ByteTokenizer(), earlier, processes=1)
    replace(path, path.read_bytes()[:-3] + b" }\n")
    assert mixed_sources.folder_of_tokens(config, ByteTokenizer()) not in (earlier, own)
    with pytest.raises(ConfigError, match="tokens of other settings"):
        tokenize(config, ByteTokenizer(), earlier, processes=1)
