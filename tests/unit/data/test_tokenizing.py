"""Text as shards of tokens: as online, the same on any number of processes, after any end."""

import errno
import multiprocessing
import os
import signal
import time
from unittest.mock import Mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.checkpoint.test_folder import flip
from tests.token_shards import write_texts
from torchtitan.config import ConfigError
from torchtitan.data import DATASETS, DataConfig, Dataset, open_source
from torchtitan.data.lanes import tokenized
from torchtitan.data.order import Document, Position, SinglePass
from torchtitan.data.sources import SOURCES
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.data.tokens.index import INDEX, ShardWriter, TokenDocuments
from torchtitan.data.tokens.tokenizing import UNFINISHED, tokenize
from torchtitan.tools.cli import main

TEXTS = [f"document {n} é " + "word " * (n % 7) * (n % 5 > 0) for n in range(60)]
TEXTS[10] = TEXTS[11] = ""
MARK = "stop here"


def jsonl(path, texts=TEXTS):
    return DataConfig(dataset=str(write_texts(path, texts)))


def source_of(kind, folder):
    if kind == "jsonl":
        return jsonl(folder / "a.jsonl")
    if kind == "parquet":
        return DataConfig(dataset=str(write_texts(folder / "a.parquet", TEXTS, 7)))
    if kind == "compressed":
        for name in ("a", "b"):
            write_texts(folder / f"{name}.jsonl.gz", [f"{name} {text}" for text in TEXTS])
        write_texts(folder / "aa.jsonl.gz", [])
        return DataConfig(dataset=str(folder))
    if kind == "text":
        for number, text in enumerate(TEXTS):
            write_texts(folder / f"{number:02}.txt", [text])
        return DataConfig(dataset=str(folder), document_bytes=20)
    return DataConfig(dataset=kind)


def online(config):
    tokenizer = ByteTokenizer()
    source = open_source(config.model_copy(update={"shuffle": False}), tokenizer, seed=0)
    documents = SinglePass(source).read({0: None}, 1)[0]
    bos, eos = config.add_bos, config.add_eos
    return (tokens for _, tokens in tokenized(documents, tokenizer, add_bos=bos, add_eos=eos))


def documents_of(folder):
    found = TokenDocuments(folder, folder, 258)
    return [found.read(number) for number in range(len(found))]


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["jsonl", "compressed", "parquet", "text", "python_stdlib"])
def test_shards_have_the_tokens_of_the_stream(kind, tmp_path):
    config = source_of(kind, tmp_path / "data")
    about = tokenize(config, ByteTokenizer(), tmp_path / "one", shard_tokens=500)
    for read, expected in zip(documents_of(tmp_path / "one"), online(config), strict=True):
        assert read.dtype == np.uint16
        assert read.tolist() == expected.tolist()
    assert (about.tokenizer, about.vocab_size) == ("bytes", 258)
    assert (about.add_bos, about.add_eos) == (True, True)
    assert about.source
    assert len(about.shards) > 2
    tokenize(config, ByteTokenizer(), tmp_path / "two", processes=2, shard_tokens=500)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_settings_of_documents_and_shards(tmp_path):
    class Large(ByteTokenizer):
        vocab_size = 2**16 + 1
        eos = 2**16

    config = jsonl(tmp_path / "a.jsonl").model_copy(update={"add_bos": False})
    about = tokenize(config, Large(), tmp_path / "out", shard_tokens=50)
    found = TokenDocuments(tmp_path / "out", tmp_path / "out", 2**16 + 1)
    assert found.read(0).dtype == np.uint32
    assert found.read(0).tolist() == [*TEXTS[0].encode(), 2**16]
    assert not about.add_bos
    assert all(shard.tokens < 50 + max(map(len, TEXTS)) + 2 for shard in about.shards)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("limit", [1, 30, 400, 10**6])
def test_the_limit_of_tokens_ends_with_a_document(limit, processes, tmp_path):
    config = jsonl(tmp_path / "a.jsonl")
    lengths = [len(tokens) for tokens in online(config)]
    call = lambda: tokenize(  # noqa: E731
        config, ByteTokenizer(), tmp_path / "out", processes=processes, max_tokens=limit
    )
    if limit == 1:
        with pytest.raises(ConfigError, match="no document has text within the limit of tokens"):
            call()
        return
    about, count = call(), int(np.sum(np.cumsum(lengths) <= limit))
    assert (about.documents, about.tokens) == (count, sum(lengths[:count]))
    for read, expected in zip(documents_of(tmp_path / "out"), online(config), strict=False):
        assert read.tolist() == expected.tolist()
    shards = {shard.file: shard.bytes for shard in about.shards}
    assert shards == {f.name: f.stat().st_size for f in (tmp_path / "out").glob("*.tokens*")}


class Waiting(ByteTokenizer):
    """Waits in the middle, until a file exists."""

    def __init__(self, file):
        self.file = file

    def encode(self, text):
        while MARK in text and not self.file.exists():
            time.sleep(0.01)
        return super().encode(text)


def _interrupted(*arguments, **settings):
    os.setpgid(0, 0)
    # Whatever started the tests may have blocked or ignored it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        tokenize(*arguments, **settings)
    except KeyboardInterrupt:
        os._exit(130)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("processes", [1, 3])
def test_an_end_in_the_middle_loses_no_complete_part(by, processes, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    config = jsonl(tmp_path / "a.jsonl", [*TEXTS, MARK, *TEXTS])
    tokenize(config, ByteTokenizer(), whole)
    tokenizer = Waiting(tmp_path / "continue")
    process = multiprocessing.get_context("fork").Process(
        target=_interrupted, args=(config, tokenizer, out), kwargs={"processes": processes}
    )
    process.start()
    # All but the one that waits, so that Python is not in a finalizer, which would swallow Ctrl-C.
    while len(list((out / UNFINISHED).glob("*.npz"))) < (7 if processes == 1 else 15):
        assert process.is_alive()
        time.sleep(0.01)
    assert process.pid
    if by == signal.SIGINT:
        os.killpg(process.pid, by)
    else:
        os.kill(process.pid, by)
    process.join()  # without a limit: its own processes would hold that up
    assert process.exitcode == (130 if by == signal.SIGINT else -signal.SIGKILL)
    assert not (out / INDEX).exists()
    complete = [path.stem for path in (out / UNFINISHED).glob("*.npz")]
    written = {file: file.stat().st_mtime_ns for name in complete for file in out.glob(f"{name}-*")}
    tokenizer.file.touch()
    tokenize(config, tokenizer, out, processes=processes)
    assert contents(out) == contents(whole)
    assert len(written) >= 7
    assert written == {file: file.stat().st_mtime_ns for file in written}


class Failing(ByteTokenizer):
    """Fails in the middle."""

    def encode(self, text):
        if MARK in text:
            raise ConfigError("stopped")
        return super().encode(text)


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_shard_is_made_again(damage, tmp_path, caplog):
    out, whole = tmp_path / "out", tmp_path / "whole"
    config = jsonl(tmp_path / "a.jsonl", [*TEXTS, MARK])
    tokenize(config, ByteTokenizer(), whole)
    with pytest.raises(ConfigError, match="stopped"):
        tokenize(config, Failing(), out)
    shard = out / "000001-000.tokens"
    if damage == "flip":
        flip(shard, 100)
    elif damage == "cut":
        os.truncate(shard, 50)
    else:
        shard.unlink()
    tokenize(config, ByteTokenizer(), out)
    assert contents(out) == contents(whole)
    (message,) = [record.message for record in caplog.records if "again" in record.message]
    assert str(shard) in message
    assert ("document 1, byte 72: damaged" if damage == "flip" else "or truncated") in message


def test_shards_are_read_back(tmp_path, monkeypatch):
    close = ShardWriter.close

    def wrong(self):
        table = close(self)
        flip(tmp_path / "out" / table.file, 0)
        return table

    monkeypatch.setattr(ShardWriter, "close", wrong)
    with pytest.raises(ConfigError, match=r"document 0, byte 0: damaged right after .*check the"):
        tokenize(jsonl(tmp_path / "a.jsonl"), ByteTokenizer(), tmp_path / "out")
    assert not (tmp_path / "out" / INDEX).exists()


def test_a_complete_folder_is_left_and_another_one_refused(tmp_path):
    config, out = jsonl(tmp_path / "a.jsonl"), tmp_path / "out"
    about = tokenize(config, ByteTokenizer(), out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert tokenize(config, ByteTokenizer(), out, processes=2) == about
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    without = config.model_copy(update={"add_bos": False})
    with pytest.raises(ConfigError, match=r"add_bos was True, is False; choose another folder"):
        tokenize(without, ByteTokenizer(), out)
    jsonl(tmp_path / "a.jsonl", TEXTS[:-1])
    with pytest.raises(ConfigError, match=r"source was .*'documents': 60.*delete this one"):
        tokenize(config, ByteTokenizer(), out)
    with pytest.raises(ConfigError, match=r"it has other files; choose another folder"):
        tokenize(config, ByteTokenizer(), tmp_path)


@pytest.mark.parametrize("processes", [1, 2])
def test_mistakes_in_text_have_their_place(processes, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.jsonl").write_text('{"text": "fine"}\n' * 40)
    (tmp_path / "data/1.jsonl").write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    config = DataConfig(dataset=str(tmp_path / "data"))
    with pytest.raises(ConfigError, match=r"1\.jsonl:2: not UTF-8 text \(.* 0xe9\)"):
        tokenize(config, ByteTokenizer(), tmp_path / "out", processes=processes)
    assert not (tmp_path / "out" / INDEX).exists()


def test_mistakes_in_rows_have_their_place(tmp_path):
    path = tmp_path / "a.parquet"
    texts = pyarrow.array([b"a", b"b", b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    config = DataConfig(dataset=str(path))
    with pytest.raises(ConfigError, match=r"a\.parquet: row 3: not UTF-8 text"):
        tokenize(config, ByteTokenizer(), tmp_path / "out")


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_nothing_to_tokenize(content, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"a\.jsonl.*(no documents|no document has text)"):
        tokenize(DataConfig(dataset=str(tmp_path / "a.jsonl")), ByteTokenizer(), tmp_path / "out")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_file_that_vanishes(processes, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "abcd":  # the last is opened by a process that is through with another
        (folder / f"{name}.jsonl").write_text('{"text": "some text"}\n' * 4)

    class Deleting(ByteTokenizer):
        def encode(self, text):
            (folder / "d.jsonl").unlink(missing_ok=True)
            return super().encode(text)

    config = DataConfig(dataset=str(folder))
    with pytest.raises(ConfigError, match=r"d\.jsonl: .*No such file"):
        tokenize(config, Deleting(), tmp_path / "out", processes=processes)


def test_a_full_disk_and_a_process_that_is_killed(tmp_path, monkeypatch):
    class Killed(ByteTokenizer):
        def encode(self, text):
            os.kill(os.getpid(), signal.SIGKILL)
            return []

    config = jsonl(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="lack of memory; run the same command again with fewer"):
        tokenize(config, Killed(), tmp_path / "out", processes=2)

    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(ShardWriter, "add", Mock(side_effect=full))
        with pytest.raises(ConfigError, match=r"out: No space left"):
            tokenize(config, ByteTokenizer(), tmp_path / "out")
    assert tokenize(config, ByteTokenizer(), tmp_path / "out").documents == 58


def test_a_source_from_outside(tmp_path, monkeypatch):
    """One that is only read in its order."""

    class Numbers:
        def __init__(self):
            self.identity = {"dataset": "numbers"}

        def epoch(self, position):
            return position.round

        def read(self, starts, lanes):
            rounds = ((n, i) for n in range(2) for i in range(5))
            return {0: (Document(Position(n, i), f"text {i}") for n, i in rounds)}

    monkeypatch.setitem(DATASETS, "numbers", Dataset("numbers", "some numbers"))
    monkeypatch.setitem(SOURCES, "numbers", lambda *_: Numbers())
    about = tokenize(DataConfig(dataset="numbers"), ByteTokenizer(), tmp_path / "out")
    assert (about.documents, len(about.shards)) == (5, 1)


def test_the_verb(tmp_path, monkeypatch, capsys, says):
    jsonl(tmp_path / "a.jsonl", [*TEXTS, MARK])
    words = ["data", "tokenize", "--dataset", str(tmp_path / "a.jsonl"), "--output"]

    class Interrupted(ByteTokenizer):
        def encode(self, text):
            if MARK in text:
                raise KeyboardInterrupt
            return super().encode(text)

    with monkeypatch.context() as patch:
        patch.setattr("torchtitan.tools.data.load_tokenizer", lambda path: Interrupted())
        assert main([*words, str(tmp_path / "out"), "--processes", "1", "--no-bos"]) == 130
    assert "the same command continues" in capsys.readouterr().err
    assert "59 documents" in says(*words, tmp_path / "out", "--processes", "1", "--no-bos")
    assert documents_of(tmp_path / "out")[0].tolist() == [*TEXTS[0].encode(), 257]
    assert "add_bos was False, is True" in says(*words, tmp_path / "out", status=2)
    for place, said in (("x", "name a data set of text, or a path"), ("s3://a/b", "on a disk")):
        assert main(["data", "tokenize", "--dataset", "synthetic", "--output", place]) == 2
        assert said in capsys.readouterr().err
