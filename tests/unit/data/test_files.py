"""Files of data that are not what they seem: found, refused by name, or read right."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.token_shards import drawn_documents, write_format, write_texts
from torchtitan.checkpoint.manifest import File, Manifest, problems_of_files, read_manifest
from torchtitan.checkpoint.ranges import files_in, read_header
from torchtitan.checkpoint.weights import opening
from torchtitan.checkpoint.weights.meta_files import _load
from torchtitan.checkpoint.weights.network import read_config
from torchtitan.checks import load_job
from torchtitan.config import ConfigError, Context
from torchtitan.config.node_files import POINTER
from torchtitan.data import (
    DATASETS,
    DataConfig,
    Dataset,
    check_local,
    documents,
    file_checks,
    load_tokenizer,
    open_source,
)
from torchtitan.data.discovery import SUFFIXES, walk
from torchtitan.data.documents import FORMATS, line_starts
from torchtitan.data.file_cache import contents_of
from torchtitan.data.lanes import tokenized
from torchtitan.data.order import Document, Position
from torchtitan.data.sources import SOURCES, ShuffledDocuments
from torchtitan.data.stream import refuse_other
from torchtitan.data.streaming import StreamedDocuments
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.data.tokens import mixed_sources
from torchtitan.data.tokens.formats import TOKEN_FORMATS
from torchtitan.data.tokens.index_cache import find_format, open_tokens
from torchtitan.data.tokens.tokenizing import tokenize
from torchtitan.metrics import SinkContext
from torchtitan.metrics.sinks import Console
from torchtitan.parallel import schedules
from torchtitan.plan.hardware import find_hardware
from torchtitan.tools.cli import main
from torchtitan.tools.compare.study import is_study
from torchtitan.tools.generate import prompts

LINES = "".join(json.dumps({"text": f"document {n} é"}) + "\n" for n in range(20)).encode()


def source(path, dataset=None):
    """What is opened at a path."""
    chosen = {"dataset": dataset, "dataset_path": str(path)} if dataset else {"dataset": str(path)}
    config = DataConfig.model_validate(chosen)
    check_local(config)
    return open_source(config, load_tokenizer(None), seed=0)


def texts(found, count):
    documents = found.read({0: None}, 1)[0]
    return [str(next(documents).content) for _ in range(count)]


def packed(content, suffix, path):
    if suffix == ".gz":
        return gzip.compress(content)
    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(content)
    return path.read_bytes()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_are_read_in_order(suffix, tmp_path):
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
def test_a_compressed_file_that_is_cut_or_false(suffix, tmp_path):
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


def test_a_wrong_line_of_a_compressed_file_has_its_number(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'\n{"text": "fine"}\n{"text": 5}\n'))
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz:3: 'text' is not a string, but int"):
        texts(source(path), 2)


KINDS = "several kinds: "
OVER_LINES = r"a\.json:1: .*; wanted JSON Lines, an? .*object on"
PACKED = "compressed text is not supported"
TAR = b"a.txt\0\0\0\0some text\n" * 20


def twice():
    """A table with two columns of one name."""
    buffer = pyarrow.BufferOutputStream()
    columns = [pyarrow.array(["some words"])] * 2
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, ["text", "text"]), buffer)
    return buffer.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("content", "dataset", "message"),
    [
        ({"a.jsonl": LINES, "b.txt": LINES}, None, KINDS + r"jsonl \(a\.jsonl\) and text \(b\.t"),
        ({"a.jsonl": LINES, "b.jsonl.gz": LINES}, None, KINDS + r"compressed \(b.* and jsonl"),
        ({"a.jsonl": LINES, "b.parquet": LINES}, None, KINDS + "jsonl .* and parquet"),
        ({"a.jsonl": LINES, "b.jsonl.gz": LINES}, "jsonl", r"plain and compressed \(b\.jsonl\.g"),
        ({"a.txt.gz": LINES}, None, rf"a\.txt\.gz: {PACKED}"),
        *(
            ({f"a{suffix}": TAR}, kind, rf"a\{suffix}: {PACKED}")
            for suffix in (".gz", ".bz2", ".tar", ".tgz", ".ZIP")
            for kind in (None, "text")
        ),
        ({"a.json": b'[\n  {"text": "a"},\n  {"text": "b"}\n]\n'}, None, OVER_LINES),
        ({"a.json": b'{\n  "text": "a"\n}\n'}, None, OVER_LINES),
        ({"a.json": b'[{"text": "a"}]\n'}, None, OVER_LINES),
        ({"a.txt": b"fine\nfine\n\xe9t\xe9\n"}, None, r"a\.txt:3: not UTF-8 text \(.* 0xe9\)$"),
        ({"a.txt": "é".encode()[:1]}, None, r"a\.txt:1: not UTF-8 text \(unexpected end"),
        ({"a.txt": "text".encode("utf-16")}, None, r"a\.txt:1: .*; is it UTF-16"),
        ({"a.jsonl": LINES + b'{"text": "\xe9"}\n'}, None, r"a\.jsonl:21: not UTF-8 text"),
        ({"a.jsonl": b""}, None, "holds no text"),
        ({"a.jsonl": b"\n \n\t\r\n"}, None, "holds no text"),
        ({"a.jsonl.gz": gzip.compress(b"\n \n")}, None, "holds no text"),
        ({"a.jsonl": 2 * b'{"text": ""}\n'}, None, "holds no text"),
        ({"a.jsonl": b"{}\n"}, None, r"a\.jsonl:1: no key 'text' \(data\.text_key\); it has none"),
        ({"a.jsonl.bz2": LINES}, "jsonl", rf"{PACKED}|no compressed files"),
        ({"a.jsonl.zstd": LINES}, None, PACKED),
        ({"a.txt": "te\nxt".encode("utf-16-le")}, None, r"a\.txt:1: not UTF-8 text \(byte 1 is 0"),
        ({"a.bin": LINES}, None, r"a\.bin: \.bin files are tokens; of Megatron, name the \.idx"),
        ({"a.tokens": LINES, "index.json": b"["}, None, r"a\.tokens: .*index\.json is missi"),
        ({"a.parquet": twice()}, None, r"a\.parquet: 2 columns 'text'"),
        ({"a.parquet": b"PAR1"}, None, r"a\.parquet: not a Parquet file"),
    ],
)
def test_what_cannot_be_read_is_refused(content, dataset, message, tmp_path):
    """In a folder, and by itself."""
    for name, written in content.items():
        (tmp_path / name).write_bytes(written)
    for path in (tmp_path, *([tmp_path / name] if len(content) == 1 else [])):
        with pytest.raises(ConfigError, match=message):
            source(path, dataset)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_checking_files_unpacks_what_takes_a_second(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed(LINES * 500, suffix, path))
    check_local(DataConfig(dataset=str(path)))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="it is truncated or damaged"):
        check_local(DataConfig(dataset=str(path)))
    monkeypatch.setattr(file_checks, "MAX_UNPACKED", 100)
    if suffix == ".gz":  # of the other, this file is one block
        check_local(DataConfig(dataset=str(path)))


def test_what_is_said_of_data_beside_it_is_no_data(tmp_path):
    for name in ("README.md", "LICENSE", "dataset.yaml", "a.jsonl"):
        (tmp_path / name).write_bytes(LINES)
    assert len(set(texts(source(tmp_path), 20))) == 20


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, content in {"a.jsonl": LINES, "a.txt": b"some text\n"}.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        (text,) = texts(source(tmp_path / name), 1)
        assert not text.startswith("\ufeff")


@pytest.mark.parametrize("command", [["check"], ["train"]])
@pytest.mark.parametrize("section", ["data", "validation"])
def test_data_is_looked_at_first(command, section, tmp_path, monkeypatch, says):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts/a.txt").write_bytes(b"fine\n\xff\n")
    Path("r.toml").write_text(f'[{section}]\ndataset = "texts"\n', encoding="utf-8")
    words = ["r.toml", "--validation.enable"] if section == "validation" else ["r.toml"]
    message = says(*command, *words, status=2).splitlines()[-1]
    assert message.startswith(
        f'error: r.toml:2: {section}.dataset: got "texts"; texts/a.txt:2: not UTF-8'
    )
    assert not Path("outputs").exists()


def held_out_notes(*words):
    notices = load_job(None, ["--validation.enable", *words], None, "cpu").notices
    return [notice for notice in notices if "validation.dataset" in notice]


def test_own_text_and_the_embedded_held_out_set(tmp_path):
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    own = ["--data.dataset", str(tmp_path)]
    (notice,) = held_out_notes(*own)
    assert 'got "python_stdlib_validation"; this part of Python\'s standard library' in notice
    assert held_out_notes() == []
    assert held_out_notes(*own, "--validation.dataset", str(tmp_path)) == []
    assert held_out_notes(*own, "--validation.dataset", "python_stdlib_validation") == []


def test_the_line_of_a_validation_names_its_data_set(tmp_path, caplog):
    caplog.set_level("INFO", "torchtitan")
    recipe = {"validation.dataset": "mine.txt", "validation.dataset_path": None}
    context = SinkContext(tmp_path, total_steps=10, color=False, recipe=recipe)
    Console(context).write(5, {"validation_loss": 3.0})
    assert caplog.messages == ["step  5/10  validation loss 3.0000  on mine.txt"]


def test_another_format_is_found_by_its_suffix_and_by_its_name(tmp_path, monkeypatch):
    """Documents between blank lines, say."""

    class Paragraphs(list[str]):
        fingerprint = "paragraphs"

        @property
        def windows(self):
            return [0, len(self)]

    def opened(files, root, text_key, document_bytes):
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
def test_a_format_that_is_incomplete_is_refused(opened, message, tmp_path, monkeypatch):
    monkeypatch.setitem(SUFFIXES, ".par", "par")
    if opened is not None:
        monkeypatch.setitem(FORMATS, "par", opened)
    (tmp_path / "a.par").write_text("one")
    with pytest.raises(ConfigError, match=message):
        check_local(DataConfig(dataset=str(tmp_path)))


def test_a_source_that_is_incomplete_is_refused(monkeypatch):
    monkeypatch.setitem(SOURCES, "mine", lambda *_: object())
    monkeypatch.setitem(DATASETS, "mine", Dataset("mine", "mine", drawn=True))
    with pytest.raises(ConfigError, match="the source mine: object has no epoch and no identity"):
        open_source(DataConfig(dataset="mine"), load_tokenizer(None), seed=0)


@pytest.mark.parametrize("content", [b"bytes", {"text": "a"}, [0.5], ["a"]])
def test_a_document_that_is_neither_text_nor_tokens(content):
    documents = iter([Document(Position(0, 3), content)])
    with pytest.raises(ConfigError, match=r"document 3 is .*; wanted a string, or a list of tok"):
        list(tokenized(documents, load_tokenizer(None), add_bos=True, add_eos=True))


TWELVE = [json.dumps({"text": f"document {n}"}) for n in range(12)]


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix.lower() == ".gz" else content)
    return path


def epoch(path, count, **settings):
    config = DataConfig(dataset=str(path), shuffle=False, **settings)
    documents = open_source(config, load_tokenizer(None), seed=0).read({0: None}, 1)[0]
    return [next(documents).content for _ in range(count)]


WALKS = {
    "text": lambda path: check_local(DataConfig(dataset=str(path))),
    "tokens": lambda path: find_format(path, TOKEN_FORMATS["auto"]()),
}


def test_links_are_followed_and_a_circle_ends(tmp_path):
    write(tmp_path / "data/a.jsonl", TWELVE[:2])
    write(tmp_path / "disk/b/c.jsonl", TWELVE[2:])
    (tmp_path / "data/b").symlink_to("../disk")
    (tmp_path / "data/c.jsonl").symlink_to("a.jsonl")
    (tmp_path / "disk/back").symlink_to("../data")
    (tmp_path / "disk/itself").symlink_to(".")
    names = [file.relative_to(tmp_path / "data").as_posix() for file in walk(tmp_path / "data")]
    assert names == ["a.jsonl", "b/b/c.jsonl", "c.jsonl"]
    assert len(set(epoch(tmp_path / "data", 14))) == 12


@pytest.mark.parametrize("name", WALKS)
def test_what_is_no_file_is_named_by_every_walk(name, tmp_path):
    write(tmp_path / "one/a.jsonl", TWELVE)
    odd = tmp_path / "one/b.jsonl"
    odd.symlink_to("/nowhere/b.jsonl")
    with pytest.raises(ConfigError, match=r"one/b\.jsonl: it is a link to /nowhere/b\.jsonl, "):
        WALKS[name](tmp_path)
    odd.unlink()
    os.mkfifo(odd)
    with pytest.raises(ConfigError, match=r"one/b\.jsonl: it is neither a file nor a folder"):
        WALKS[name](tmp_path)


def deny(monkeypatch, folder):
    """Let nobody read the folders of a name."""
    scandir = os.scandir

    def refused(path):
        if str(path).endswith(folder):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)


@pytest.mark.parametrize("name", WALKS)
def test_a_folder_that_cannot_be_read_is_named(name, tmp_path, monkeypatch):
    write(tmp_path / "one/a.jsonl", TWELVE)
    deny(monkeypatch, "one")
    with pytest.raises(ConfigError, match="/one: cannot be read: Permission denied"):
        WALKS[name](tmp_path)


def test_a_path_that_is_not_there_is_explained(tmp_path):
    (tmp_path / "link").symlink_to("/nowhere")
    write_format(tmp_path / "shards", "megatron", [drawn_documents(3)], "uint16")
    name = str(next((tmp_path / "shards").glob("*.idx")).with_suffix(""))
    told = {tmp_path / "link": "a link to /nowhere", name: f"mean {name}.idx"}
    for path, message in told.items():
        (problem,) = DataConfig(dataset=str(path)).problems(Context())
        assert message in problem.message


def test_a_source_without_a_path_has_no_files():
    assert DataConfig.model_validate({"sources": [{"weight": 1}]}).sections() == []


def test_no_error_of_the_disk_is_a_traceback(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "a.jsonl", TWELVE)
    opened = np.memmap

    def refused(file, *arguments):
        if Path(file) == path:
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, *arguments)

    monkeypatch.setattr(np, "memmap", refused)
    assert main(["data", "tokenize", "--dataset", str(path), "--output", str(tmp_path / "o")]) == 2
    assert f"{path}: cannot be read: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.JSONL", "a.Json", "a.jsonl.GZ", "a.JSONL.gz", "a.jl"])
def test_suffixes_in_any_case(name, tmp_path):
    write(tmp_path / name, TWELVE)
    assert epoch(tmp_path, 12) == [f"document {n}" for n in range(12)]


def test_tokens_in_capitals(tmp_path):
    shards = write_format(tmp_path / "shards", "megatron", [drawn_documents(12)], "uint16")
    for file in list(shards.iterdir()):
        file.rename(file.with_suffix(file.suffix.upper()))
    found = open_tokens(shards, TOKEN_FORMATS["megatron"](), ByteTokenizer(), 258, tmp_path)
    assert len(found) == 12


@pytest.mark.parametrize("kind", [None, "text", "jsonl"])
@pytest.mark.parametrize("name", ["a.csv", "b/a.TSV", "data-0.arrow"])
def test_tables_are_never_text(name, kind, tmp_path):
    write(tmp_path / name, ["id,text", "1,words"])
    if name.endswith("arrow"):
        write(tmp_path / "state.json", ["{"])
        write(tmp_path / "dataset_info.json", ["{"])
    chosen = {"dataset": kind, "dataset_path": str(tmp_path)} if kind else {}
    config = DataConfig.model_validate(chosen or {"dataset": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"files are not read; write the data as Parquet: python"):
        open_source(config, load_tokenizer(None), seed=0)


def test_the_advice_for_a_table_works(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": ["some words"] * 9}).save_to_disk("saved")
    with pytest.raises(ConfigError) as error:
        open_source(DataConfig(dataset="saved"), load_tokenizer(None), seed=0)
    exec(str(error.value).partition("python -c '")[2].removesuffix("'"))
    assert epoch(tmp_path / "saved.parquet", 9) == ["some words"] * 9


def verify(path):
    saved = Manifest(1, False, 1, {}, "", {path.name: File(12345678, "")})
    raise ConfigError(next(problems_of_files(path.parent, saved)))


READERS = {
    "a.txt": lambda path: epoch(path, 1),
    "a.jsonl": lambda path: epoch(path, 1),
    "a.parquet": lambda path: epoch(path.parent, 1),
    "a.jsonl.gz": lambda path: epoch(path, 1),
    "a.csv": lambda path: epoch(path, 1),
    "a.idx": lambda path: find_format(path.parent, TOKEN_FORMATS["auto"]()),
    "a.npy": lambda path: find_format(path.parent, TOKEN_FORMATS["auto"]()),
    "tokenizer.json": lambda path: load_tokenizer(str(path)),
    "tokenizer.model": lambda path: load_tokenizer(str(path.parent)),
    "model.safetensors": lambda path: read_header(path, files_in(path.parent)),
    "config.json": read_config,
    "consolidated.00.pth": _load,
    "pytorch_model.bin": lambda path: opening.find_format(path.parent),
    "rank-0.safetensors": verify,
    "manifest.json": lambda path: read_manifest(path.parent),
    "recipe.toml": lambda path: load_job(path, (), 1, "cpu"),
    "study.toml": is_study,
    "hardware.toml": lambda path: find_hardware(str(path)),
    "schedule.csv": schedules.read,
    "prompts.txt": lambda path: list(prompts([], path)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_of_git_lfs_is_named_as_such(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(POINTER + b"v1\noid sha256:%064d\nsize 12345678\n" % 7)
    with pytest.raises(ConfigError, match=f"{name}: it is only the pointer of a file that Git LFS"):
        READERS[name](path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("is_cached", [False, True])
def test_lines_of_blanks_are_no_documents(suffix, is_cached, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "CACHED_BYTES", 1 if is_cached else 2**20)
    lines = ["", "   ", TWELVE[0], "\t\r", f" {TWELVE[1]}", "\r", f"\r{TWELVE[2]}\r", "\v\f", " "]
    path = write(tmp_path / f"a.jsonl{suffix}", lines)
    check_local(DataConfig(dataset=str(path)))
    assert epoch(path, 4) == [f"document {n % 3}" for n in range(4)]


def nulls(kind, path):
    return write_texts(path / f"a.{kind}", ["zero", None, "two", None, "four"])


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_null_is_an_error_of_the_check_or_skipped_and_counted(kind, tmp_path, capsys):
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
    printed = capsys.readouterr()
    assert "3 documents" in printed.out
    assert "data: 2 documents skipped, as the text is null" in printed.err
    empty = write_texts(tmp_path / "empty" / f"a.{kind}", [None, None])
    with pytest.raises(ConfigError, match="holds no text"):
        check_local(DataConfig(dataset=str(empty), null_text="skip"))


def test_skipped_nulls_are_a_metric(tmp_path):
    from torchtitan.tasks.next_token import NextToken

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


def replace(path, content):
    """Replace a file by another of the same size and time."""
    before = path.stat()
    assert len(content) == before.st_size
    path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_index_of_lines_notices_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "CACHED_BYTES", 1)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"ab\ncdef\n")
    assert line_starts(path).tolist() == [0, 3]
    replace(path, b"abcd\nef\n")
    assert line_starts(path).tolist() == [0, 5]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_a_run_notices_another_file_and_one_of_before_resumes(kind, tmp_path):
    path = write(tmp_path / f"a.{kind}", TWELVE)
    config = DataConfig(dataset=str(path))
    saved = dict(open_source(config, load_tokenizer(None), seed=0).identity)
    content = path.read_bytes()
    replace(path, content[:-1] + bytes([content[-1] ^ 1]))
    own = open_source(config, load_tokenizer(None), seed=0).identity
    with pytest.raises(ConfigError, match="content was"):
        refuse_other(saved, own)
    del saved["content"]
    refuse_other(saved, own)


def test_the_index_of_tokens_notices_other_documents(tmp_path):
    def lengths():
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


def test_many_files_are_known_by_some(tmp_path):
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


def test_tokens_that_were_written_before_are_used_until_the_text_is_replaced(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", TWELVE)
    config, folder_of = DataConfig(dataset=str(path)), mixed_sources._folder
    folders = []

    def recorded(config, made_of):
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
    for key in ("add_bos", "add_eos"):
        other = config.model_copy(update={key: False})
        assert mixed_sources.folder_of_tokens(other, ByteTokenizer()) not in (earlier, own)
    tokenize(config, ByteTokenizer(), earlier, processes=1)
    replace(path, path.read_bytes()[:-3] + b" }\n")
    assert mixed_sources.folder_of_tokens(config, ByteTokenizer()) not in (earlier, own)
    with pytest.raises(ConfigError, match="tokens of other settings"):
        tokenize(config, ByteTokenizer(), earlier, processes=1)
