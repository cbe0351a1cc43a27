"""Files that are not what they seem: refused in words before a run starts, or read right."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from torchtitan.config import ConfigError, Context
from torchtitan.data import (
    DATASETS,
    DataConfig,
    Dataset,
    check_local,
    first_look,
    load_tokenizer,
    open_source,
)
from torchtitan.data.discovery import SUFFIXES
from torchtitan.data.documents import FORMATS, Documents
from torchtitan.data.hub import StreamedDocuments
from torchtitan.data.lanes import tokenized
from torchtitan.data.order import Document, Position, Source
from torchtitan.data.sources import SOURCES
from torchtitan.tools.cli import main

LINES = "".join(json.dumps({"text": f"document {n} é"}) + "\n" for n in range(20)).encode()


def source(path: Path, dataset: str | None = None) -> Source:
    """What is opened at a path."""
    chosen = {"dataset": dataset, "dataset_path": str(path)} if dataset else {"dataset": str(path)}
    config = DataConfig.model_validate(chosen)
    check_local(config)
    return open_source(config, load_tokenizer(None), seed=0)


def texts(found: Source, count: int) -> list[str]:
    documents = found.read({0: None}, 1)[0]
    return [str(next(documents).content) for _ in range(count)]


def packed(content: bytes, suffix: str, path: Path) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(content)
    return path.read_bytes()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_are_read_in_order(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed(LINES + b"\n\n", suffix, path))
    found = source(path)
    assert isinstance(found, StreamedDocuments)
    assert texts(found, 40) == 2 * [f"document {n} é" for n in range(20)]
    later = found.read({0: None}, 1)[0]
    positions = [next(later).position for _ in range(25)]
    again = found.read({0: positions[22]}, 1)[0]
    assert [next(again).position for _ in range(2)] == positions[22:24]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_or_false(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    whole = packed(LINES * 500, suffix, path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=rf"a\.jsonl\{suffix}: it is truncated or damaged: \w"):
        texts(source(path), 20_000)
    path.write_bytes(LINES)
    with pytest.raises(ConfigError, match=r"it is not compressed as its name says"):
        source(path)
    path.write_bytes(whole[:3])
    with pytest.raises(ConfigError, match=r"not compressed as|truncated"):
        source(path)


def test_a_wrong_line_of_a_compressed_file_has_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'\n{"text": "fine"}\n{"text": 5}\n'))
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz:3: 'text' is not a string, but int"):
        texts(source(path), 2)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.jsonl", "b.txt"], r"several kinds: jsonl \(a\.jsonl\) and text \(b\.txt\); choose"),
        (["a.jsonl", "b.jsonl.gz"], r"several kinds: compressed \(b\.jsonl\.gz\) and jsonl"),
        (["a.jsonl", "b.parquet"], r"several kinds: jsonl .* and parquet"),
        (["a.txt.gz"], r"a\.txt\.gz: compressed text is not supported"),
    ],
)
def test_a_folder_of_several_kinds(names: list[str], message: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(LINES)
    with pytest.raises(ConfigError, match=message):
        source(tmp_path)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".tar", ".tgz", ".ZIP"])
@pytest.mark.parametrize("kind", [None, "text"])
def test_packed_text_is_refused(suffix: str, kind: str | None, tmp_path: Path) -> None:
    """By itself and in a folder; the bytes of a tar archive would pass for text."""
    (tmp_path / f"a{suffix}").write_bytes(b"a.txt\0\0\0\0some text\n" * 20)
    for path in (tmp_path / f"a{suffix}", tmp_path):
        with pytest.raises(ConfigError, match=rf"a\{suffix}: compressed text is not supported"):
            source(path, kind)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_first_look_unpacks_what_takes_a_second(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed(LINES * 500, suffix, path))
    check_local(DataConfig(dataset=str(path)))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="it is truncated or damaged"):
        check_local(DataConfig(dataset=str(path)))
    monkeypatch.setattr(first_look, "MAX_UNPACKED", 100)
    if suffix == ".gz":  # of the other, this file is one block
        check_local(DataConfig(dataset=str(path)))


def test_what_is_said_of_data_beside_it_is_no_data(tmp_path: Path) -> None:
    for name in ("README.md", "LICENSE", "dataset.yaml", "a.jsonl"):
        (tmp_path / name).write_bytes(LINES)
    assert len(set(texts(source(tmp_path), 20))) == 20


def test_a_named_kind_is_not_read_by_half(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    with pytest.raises(ConfigError, match=r"both plain and compressed \(b\.jsonl\.gz\)"):
        source(tmp_path, "jsonl")


@pytest.mark.parametrize(
    "content",
    ['[\n  {"text": "a"},\n  {"text": "b"}\n]\n', '{\n  "text": "a"\n}\n', '[{"text": "a"}]\n'],
)
def test_json_over_several_lines(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a\.json:1: .*; wanted JSON Lines, an? .*object on"):
        source(path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, content in {"a.jsonl": LINES, "a.txt": b"some text\n"}.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        (text,) = texts(source(tmp_path / name), 1)
        assert not text.startswith("\ufeff")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nfine\n\xe9t\xe9\n", r"a\.txt:3: not UTF-8 text \(.* 0xe9\)$"),
        ("a.txt", "é".encode()[:1], r"a\.txt:1: not UTF-8 text \(unexpected end"),
        ("a.txt", "text".encode("utf-16"), r"a\.txt:1: .*; is it UTF-16\?"),
        ("a.jsonl", LINES + b'{"text": "\xe9"}\n', r"a\.jsonl:21: not UTF-8 text"),
        ("a.jsonl", b"", r"a\.jsonl holds no documents"),
        ("a.parquet", b"PAR1", r"a\.parquet: not a Parquet file"),
    ],
)
def test_what_is_no_text(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        source(path)


@pytest.mark.parametrize("command", [["check"], ["train"]])
@pytest.mark.parametrize("section", ["data", "validation"])
def test_data_is_looked_at_before_anything_is_started(
    command: list[str],
    section: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts/a.txt").write_bytes(b"fine\n\xff\n")
    Path("r.toml").write_text(f'[{section}]\ndataset = "texts"\n', encoding="utf-8")
    words = ["r.toml", "--validation.enable"] if section == "validation" else ["r.toml"]
    assert main([*command, *words]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(
        f'error: r.toml:2: {section}.dataset: got "texts"; texts/a.txt:2: not UTF-8'
    )
    assert not Path("outputs").exists()


def held_out_notes(*words: str) -> list[str]:
    from torchtitan.checks import load_job

    notices = load_job(None, ["--validation.enable", *words], None, "cpu").notices
    return [notice for notice in notices if "validation.dataset" in notice]


def test_own_text_and_the_embedded_held_out_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    own = ["--data.dataset", str(tmp_path)]
    (notice,) = held_out_notes(*own)
    assert 'got "python_stdlib_validation"; this part of Python\'s standard library' in notice
    assert held_out_notes() == []
    assert held_out_notes(*own, "--validation.dataset", str(tmp_path)) == []
    assert held_out_notes(*own, "--validation.dataset", "python_stdlib_validation") == []


def test_the_line_of_a_validation_names_its_data_set(tmp_path: Path) -> None:
    from torchtitan.metrics import SinkContext
    from torchtitan.metrics.sinks import Console

    logged: list[str] = []
    write: Callable[..., None] = lambda line, *words: logged.append(line % words)  # noqa: E731
    recipe = {"validation.dataset": "mine.txt", "validation.dataset_path": None}
    context = SinkContext(
        folder=tmp_path,
        rank=0,
        total_steps=10,
        tensorboard_folder="tb",
        color=False,
        run_name="",
        tags=(),
        recipe=recipe,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtitan.metrics.sinks.logger.info", write)
        Console(context).write(5, {"validation_loss": 3.0})
    assert logged == ["step  5/10  validation loss 3.0000  on mine.txt"]


def test_another_format_is_found_by_its_suffix_and_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents between blank lines, say."""

    class Paragraphs(list[str]):
        fingerprint = "paragraphs"

        @property
        def windows(self) -> list[int]:
            return [0, len(self)]

    def opened(files: Sequence[Path], root: Path, text_key: str, document_bytes: int) -> Documents:
        if any(not path.stat().st_size for path in files):
            raise ConfigError("no paragraphs")
        return Paragraphs([each for path in files for each in path.read_text().split("\n\n")])

    monkeypatch.setitem(SUFFIXES, ".par", "paragraphs")
    monkeypatch.setitem(FORMATS, "paragraphs", opened)
    monkeypatch.setitem(DATASETS, "mine", Dataset("paragraphs", "paragraphs", reads_path=True))
    (tmp_path / "a.par").write_text("one\n\ntwo")
    assert set(texts(source(tmp_path), 4)) == {"one", "two"}
    assert set(texts(source(tmp_path, "mine"), 4)) == {"one", "two"}
    (tmp_path / "b.txt").write_text("three")
    with pytest.raises(ConfigError, match=r"several kinds: paragraphs \(a\.par\) and text"):
        source(tmp_path)
    assert set(texts(source(tmp_path, "mine"), 4)) == {"one", "two"}
    (problem,) = DataConfig(dataset="mine").problems(Context())
    assert problem.path == "dataset_path"
    (tmp_path / "c.par").touch()
    with pytest.raises(ConfigError, match="no paragraphs"):
        check_local(DataConfig(dataset="mine", dataset_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("opened", "message"),
    [
        (lambda *_: ["a"], "the format par: list has no fingerprint and no windows; add what"),
        (None, "no format is called par; allowed: text"),
    ],
)
def test_a_format_that_is_incomplete_is_refused_by_the_check(
    opened: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SUFFIXES, ".par", "par")
    if opened is not None:
        monkeypatch.setitem(FORMATS, "par", opened)
    (tmp_path / "a.par").write_text("one")
    with pytest.raises(ConfigError, match=message):
        check_local(DataConfig(dataset=str(tmp_path)))


def test_a_source_that_is_incomplete_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "mine", lambda *_: object())
    monkeypatch.setitem(DATASETS, "mine", Dataset("mine", "mine", drawn=True))
    with pytest.raises(ConfigError, match="the source mine: object has no epoch and no identity"):
        open_source(DataConfig(dataset="mine"), load_tokenizer(None), seed=0)


@pytest.mark.parametrize("content", [b"bytes", {"text": "a"}, [0.5], ["a"]])
def test_a_document_that_is_neither_text_nor_tokens(content: Any) -> None:
    documents = iter([Document(Position(0, 3), content)])
    with pytest.raises(
        ConfigError, match=r"document 3 is .*; wanted a string, or a list of tokens"
    ):
        list(tokenized(documents, load_tokenizer(None), add_bos=True, add_eos=True))
