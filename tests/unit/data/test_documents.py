"""Local files: every document found, every mistake told with its file and line."""

import itertools
import json
import math
import multiprocessing
import os
import random
import tempfile
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests import token_shards
from torchtitan.checks import load_job
from torchtitan.config import ConfigError, Context
from torchtitan.data import (
    DataConfig,
    check_local,
    documents,
    file_checks,
    load_tokenizer,
    open_source,
    order,
)
from torchtitan.data.discovery import find_files
from torchtitan.data.documents import ParquetDocuments, line_starts, open_documents
from torchtitan.data.order import drawn_order
from torchtitan.data.sources import ShuffledDocuments
from torchtitan.data.tokens.index import TokenDocuments
from torchtitan.inputs import problems_of_files


def opened(path, kind=None, document_bytes=65536):
    files, found = find_files(path, kind)
    return open_documents(path, files, found, text_key="text", document_bytes=document_bytes)


def contents(documents):
    return [documents[index] for index in range(len(documents))]


def test_text_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("eins\r\n", newline="")
    (tmp_path / "a.py").write_text("zwei é")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert contents(opened(tmp_path)) == ["zwei é", "eins\r\n"]


def test_long_text_is_cut_at_line_ends(tmp_path):
    path = tmp_path / "long.txt"
    lines = [f"line {number}\n" for number in range(50)]
    path.write_text("".join(lines))
    documents = contents(opened(path, document_bytes=100))
    assert "".join(documents) == "".join(lines)
    assert all(80 < len(d) <= 100 and d.endswith("\n") for d in documents[:-1])


def test_long_lines_are_cut_at_characters(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("世界é" * 40 + "\n" + "x" * 7)
    documents = contents(opened(path, document_bytes=10))
    assert "".join(documents) == path.read_text()
    assert max(len(d.encode()) for d in documents) <= 12


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"fine\n" * 30 + b"caf\xe9 au lait\n")
    for document_bytes in (20, 65536):
        documents = opened(path, document_bytes=document_bytes)
        with pytest.raises(ConfigError, match=r"latin\.txt:31: not UTF-8 text"):
            contents(documents)


def test_jsonl(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n\r\n{"text": "two\\n\\ud800"}')
    (tmp_path / "b.json").write_text('{"id": 1, "text": "three"}\r\n')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.md").write_text("not data")
    expected = ["one", "two\n\N{REPLACEMENT CHARACTER}", "three"]
    assert contents(opened(tmp_path)) == expected
    assert contents(opened(tmp_path, "text"))[-1] == "not data"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"data\.jsonl:3: not a line of JSON: Unterminated string"),
        ('["text"]', r"data\.jsonl:3: not a JSON object, but list"),
        ('{"body": "a", "id": 1}', r"data\.jsonl:3: no key 'text' .*it has 'body', 'id'"),
    ],
)
def test_jsonl_mistakes_name_file_and_line(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    documents = opened(path)
    assert documents[0] == "fine"
    with pytest.raises(ConfigError, match=message):
        documents[1]


def write_parquet(path, texts, group=10):
    table = pyarrow.table({"text": texts, "id": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, path, row_group_size=group)


def test_parquet(tmp_path):
    texts = [f"document {number}" for number in range(57)]
    write_parquet(tmp_path / "a.parquet", texts[:35])
    write_parquet(tmp_path / "b.parquet", texts[35:])
    documents = opened(tmp_path)
    assert contents(documents) == texts
    assert documents.windows == [0, 57]


def test_parquet_is_shuffled_inside_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(ParquetDocuments, "window_rows", 20)
    write_parquet(tmp_path / "a.parquet", [str(number) for number in range(95)])
    documents = opened(tmp_path)
    assert documents.windows == [0, 20, 40, 60, 80, 95]
    order = [int(index) for index in drawn_order(documents.windows, seed=0, epoch=0, shuffle=True)]
    assert sorted(order) == list(range(95)) != order
    assert sum(a // 20 != b // 20 for a, b in itertools.pairwise(order)) == 4
    assert [documents[index] for index in order] == [str(index) for index in order]


@pytest.mark.parametrize("distinct", [2**13, 2**11])
def test_the_memory_of_parquet_does_not_follow_its_row_groups(distinct, tmp_path, monkeypatch):
    rng = random.Random(0)
    texts = [rng.randbytes(2**11).hex() for _ in range(distinct)] * (2**13 // distinct)  # 32 MiB
    column = pyarrow.array(texts)
    if distinct < len(texts):
        column = column.dictionary_encode()
    table = pyarrow.table({"text": column})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2**13)
    whole = opened(tmp_path)
    monkeypatch.setattr(ParquetDocuments, "window_bytes", 2**20)
    monkeypatch.setattr(ParquetDocuments, "batch_bytes", 2**18)
    documents, usual = opened(tmp_path), pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(pyarrow.system_memory_pool())
    pyarrow.set_memory_pool(pool)
    try:
        order = drawn_order(documents.windows, seed=0, epoch=0, shuffle=True)
        assert all(documents[int(index)] == texts[index] for index in order)
    finally:
        pyarrow.set_memory_pool(usual)
    assert 0 < pool.max_memory() < 2**24
    assert (documents.windows, documents.fingerprint) == (whole.windows, whole.fingerprint)
    assert list((tmp_path / ".torchtitan").iterdir()) == []


def test_a_large_row_group_is_read_where_no_file_can_be_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ParquetDocuments, "window_bytes", 0)
    write_parquet(tmp_path / "a.parquet", ["a", "b"])
    (tmp_path / ".torchtitan").touch()
    assert contents(opened(tmp_path / "a.parquet")) == ["a", "b"]
    assert "all of row group 1" in caplog.text


@pytest.mark.parametrize("limit", [0, 2**28])
def test_parquet_mistakes(limit, tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    write_parquet(path, ["a"] * 25)
    config = DataConfig(dataset=str(path), text_key="body")
    with pytest.raises(ConfigError, match=r"a\.parquet: no column 'body' .*it has text, id"):
        open_source(config, load_tokenizer(None), seed=0)
    whole = path.read_bytes()
    monkeypatch.setattr(ParquetDocuments, "window_bytes", limit)
    tens = [at for at, byte in enumerate(whole) if byte == 2 * 10]
    told = []
    for at in tens:  # the number of rows of a group is among them
        path.write_bytes(whole[:at] + bytes([2 * 11]) + whole[at + 1 :])
        try:
            contents(opened(path))
        except ConfigError as error:
            told.append(str(error).partition(": ")[2])
    assert "row group 1 is damaged: it has 10 rows, and the file says 11" in told


@pytest.mark.parametrize(
    "values",
    [pyarrow.array([1]), pyarrow.array([b"a"]), pyarrow.array([["a"]]), pyarrow.nulls(1)],
    ids=lambda values: str(values.type),
)
def test_parquet_whose_column_has_no_strings(values, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"the column 'text' has .*; wanted strings"):
        opened(tmp_path)


@pytest.mark.parametrize("limit", [0, 2**28])
@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.string_view()], ids=str)
def test_parquet_of_strings_of_any_kind(kind, limit, tmp_path, monkeypatch):
    monkeypatch.setattr(ParquetDocuments, "window_bytes", limit)
    coded = pyarrow.array(["a"]).dictionary_encode()
    old_times = {"use_deprecated_int96_timestamps": True}  # of which only Arrow's schema tells
    for values, how in ((pyarrow.array(["a"], kind), {}), (coded, {}), (coded, old_times)):
        table = pyarrow.table({"text": values, "time": pyarrow.array([0], pyarrow.timestamp("us"))})
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet", **how)
        assert contents(opened(tmp_path)) == ["a"]


def test_nothing_to_read(tmp_path):
    with pytest.raises(ConfigError, match="holds no text files"):
        opened(tmp_path)
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError, match="holds no documents: its text files are empty"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match="holds no parquet files"):
        opened(tmp_path, "parquet")
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no documents: its jsonl files are empty"):
        opened(tmp_path)
    write_parquet(tmp_path / "a.parquet", ["a"])
    assert contents(opened(tmp_path, "parquet")) == ["a"]


def test_fingerprint_follows_the_files_not_their_place(tmp_path):
    fingerprints = []
    for folder, text in [("a", "same"), ("b", "same"), ("c", "longer")]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data.jsonl").write_text(json.dumps({"text": text}))
        fingerprints.append(opened(tmp_path / folder).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_check_accepts_what_works():
    for settings in ({}, {"dataset": "c4"}, {"dataset": "/"}, {"lanes": 24, "num_workers": 8}):
        config = DataConfig.model_validate(settings)
        assert [*config.problems(Context()), *config.batch_problems(12, 3)] == []


def test_opening_reports_the_same_mistakes():
    config = DataConfig(dataset="fineweb", dataset_path="no/such")
    with pytest.raises(
        ConfigError,
        match=r'data\.dataset_path: .*\ndata\.dataset: got "fineweb"; not a data set name',
    ):
        open_source(config, load_tokenizer(None), seed=0)


@pytest.mark.parametrize("windows", [[0, 3000], [0, 700, 710, 1410, 3000]])
def test_an_order_of_many_items_is_computed_and_complete(windows, monkeypatch):
    listed = list(drawn_order(windows, seed=1, epoch=0, shuffle=True))
    monkeypatch.setattr(order, "MOST_LISTED", 100)
    found = {}
    for seed, epoch in ((1, 0), (1, 1), (2, 0)):
        computed = drawn_order(windows, seed, epoch, shuffle=True)
        items = computed.at(np.arange(3000)).tolist()
        assert sorted(items) == list(range(3000))
        assert items[:10] == [computed[place] for place in range(10)]
        # Each window is read as a whole.
        numbers = np.searchsorted(windows, items, side="right")
        assert np.count_nonzero(np.diff(numbers)) == len(windows) - 2
        found[seed, epoch] = items
    orders, bounds = [*found.values(), listed], itertools.pairwise(windows)
    inside = [tuple(i - a for i in each if a <= i < b) for a, b in bounds for each in orders]
    assert len(set(inside)) == len(inside), "each window, seed and epoch has an order of its own"


def test_a_permutation_is_well_mixed():
    """Neighbours are as far apart, and places as independent of items, as in a random order."""
    size = 100_000
    items = order.Permutation(size, [3, 1]).at(np.arange(size))
    assert sorted(items.tolist()) == list(range(size))
    distance = np.abs(np.diff(items)).mean() / size
    assert distance == pytest.approx(1 / 3, abs=0.005)
    assert abs(np.corrcoef(np.arange(size), items)[0, 1]) < 0.02
    assert np.count_nonzero(items == np.arange(size)) < 10


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("most_listed", [0, 100])
def test_all_orders_of_a_few_windows_are_as_likely(size, most_listed, monkeypatch):
    monkeypatch.setattr(order, "MOST_LISTED", most_listed)
    windows, draws = [3 * n for n in range(size + 1)], 20 * math.factorial(size)
    found = Counter[tuple[int, ...]]()
    for seed in range(draws):
        items = drawn_order(windows, seed, 0, shuffle=True).at(np.arange(3 * size))
        assert sorted(items) == list(range(3 * size))
        found[tuple((items[::3] // 3).tolist())] += 1
    assert len(found) == math.factorial(size)
    chance = sum((count - 20) ** 2 / 20 for count in found.values())
    assert chance < len(found) + 4 * math.sqrt(2 * len(found))


def test_an_order_does_not_use_the_generators_of_numpy(monkeypatch):
    expected = [6, 7, 9, 5, 8, 1, 2, 3, 0, 4]
    monkeypatch.delattr(np.random, "default_rng")
    assert list(drawn_order([0, 5, 10], 0, 0, shuffle=True).at(np.arange(10))) == expected


@pytest.mark.parametrize("saved", [{}, {"order": "computed"}], ids=["listed", "computed"])
def test_a_run_of_an_earlier_version_continues_its_order(saved, monkeypatch):
    drawn = {
        "listed": [8, 11, 4, 7, 5, 0, 1, 9, 2, 10, 6, 3],
        "computed": [3, 0, 10, 4, 5, 2, 9, 11, 1, 8, 7, 6],
    }
    monkeypatch.setattr(order, "MOST_LISTED", 5)
    source = ShuffledDocuments("texts", TokenTexts(12), seed=1, shuffle=True)
    assert source.identity["order"] == order.ORDER
    source.resume({key: value for key, value in source.identity.items() if key != "order"} | saved)
    assert source.identity.get("order") == saved.get("order")
    found = [int(each.content) for each in itertools.islice(source.read({0: None}, 1)[0], 12)]
    assert found == drawn[saved.get("order", "listed")]


class TokenTexts:
    """Numbers as documents."""

    fingerprint = "numbers"

    def __init__(self, count):
        self.windows = [0, count]

    def __len__(self):
        return self.windows[-1]

    def __getitem__(self, index):
        return str(index)


CONTENT = b'\n{"text": "a"}\n\r\n{"text": "b"}\r\n\n' + b'{"text": "c"}\n' * 50


@pytest.fixture
def built(monkeypatch):
    """The files that were indexed; all are large enough to be cached, and read in blocks."""
    files = []
    blocks = documents._blocks
    monkeypatch.setattr(documents, "CACHED_BYTES", 1)
    monkeypatch.setattr(documents, "BLOCK", 7)
    monkeypatch.setattr(documents, "_blocks", lambda path: (files.append(path), blocks(path))[1])
    return files


def expected(content):
    places = [0, *(i + 1 for i, byte in enumerate(content) if byte == ord("\n"))]
    return [i for i in places if content[i : i + 1] not in (b"", b"\n", b"\r")]


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_an_index_is_built_once_and_after_a_change(is_elsewhere, tmp_path, built):
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


def test_an_index_that_cannot_be_written_is_in_memory(tmp_path, built):
    path = tmp_path / "a.jsonl"
    path.write_bytes(CONTENT)
    (tmp_path / ".torchtitan").write_text("no folder")
    assert line_starts(path).tolist() == expected(CONTENT)
    assert built == [path]


def test_the_setting_names_the_folder(tmp_path, built):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some text"}) + "\n")
    config = DataConfig(dataset=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache"))
    open_source(config, load_tokenizer(None), seed=0)
    assert len(list((tmp_path / "cache").glob("lines-a.jsonl-*.i64"))) == 1
    assert not (tmp_path / ".torchtitan").exists()


KINDS = {"text": "a.txt", "jsonl": "a.jsonl", "compressed": "a.jsonl.gz", "parquet": "a.parquet"}


MANY = ["a document\n"] * 200


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_deleted(kind, tmp_path):
    files = [tmp_path / KINDS[kind].replace("a.", f"{name}.") for name in "abc"]
    for file in files:
        token_shards.write_texts(file, MANY, 10)
    config = DataConfig(dataset=str(tmp_path), shuffle=False)
    documents = open_source(config, None, seed=0).read({0: None}, 1)[0]
    next(documents)
    for file in files[1:]:
        file.unlink()
    with pytest.raises(ConfigError, match=f"{files[1].name}.*No such file"):
        list(itertools.islice(documents, 400))


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_text_that_is_truncated(kind, tmp_path):
    """A mapped file would end the process by a signal."""
    file = token_shards.write_texts(tmp_path / KINDS[kind], MANY)
    config = DataConfig(dataset=str(file), shuffle=False, document_bytes=100)
    documents = open_source(config, None, seed=0).read({0: None}, 1)[0]
    next(documents)
    os.truncate(file, 1000)
    with pytest.raises(ConfigError, match=rf"{file.name}: byte 1,000: the file ends here"):
        list(itertools.islice(documents, 400))


def test_shards_that_are_deleted_or_truncated(tmp_path):
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


@pytest.fixture
def looks(monkeypatch, tmp_path):
    """Counts the looks of all processes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(file_checks, "SHARED_BYTES", 1)
    check = file_checks._check

    def counted(*arguments):
        with (tmp_path / "looks").open("a") as file:
            file.write(".")
        check(*arguments)

    monkeypatch.setattr(file_checks, "_check", counted)
    return lambda: len((tmp_path / "looks").read_text())


def _refused(config):
    try:
        check_local(config)
    except ConfigError:
        os._exit(2)


def exit_codes(config):
    """What some processes that start together say."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_refused, args=(config,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def test_one_process_looks_and_all_refuse(tmp_path, looks):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    config = DataConfig(dataset=str(path))
    assert exit_codes(config) == [0] * 4
    assert looks() == 1
    path.write_text('{"body": "a"}\n')
    assert exit_codes(config) == [2] * 4
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: no key 'text'"):
        check_local(config)
    path.write_text('{"text": "b"}\n')
    before = looks()
    assert exit_codes(config) == [0] * 4
    assert looks() == before + 1
    with pytest.raises(ConfigError, match="no key 'body'"):
        check_local(config.model_copy(update={"text_key": "body"}))


def test_the_launcher_and_its_ranks_look_once(tmp_path, looks):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    for _ in range(3):
        job = load_job(None, ["--data.dataset", str(path)], 1, "cpu", is_here=True).config
        assert list(problems_of_files(job)) == []
    assert looks() == 1


def test_without_a_folder_every_process_looks(tmp_path, looks, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    assert exit_codes(DataConfig(dataset=str(path))) == [0] * 4
    assert looks() == 4
