"""Shards of tokens on object stores: fetched when they are needed, into a cache with a limit."""

import errno
import multiprocessing
import os
import shutil
import uuid
from functools import partial

import numpy as np
import pytest

from tests import token_shards
from tests.object_store import ObjectStore
from torchtitan import remote
from torchtitan.config import ConfigError, Unreachable
from torchtitan.data import DataConfig, check_local, file_cache, open_source
from torchtitan.data.file_cache import fetch_all
from torchtitan.data.order import drawn_order
from torchtitan.data.settings import SourceConfig
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.data.tokens import index_cache
from torchtitan.data.tokens.formats import TOKEN_FORMATS, OwnFormat
from torchtitan.data.tokens.index import ShardWriter, write_index
from torchtitan.data.tokens.index_cache import open_tokens, record_all
from torchtitan.data.tokens.mixed_sources import open_token_sources
from torchtitan.remote import RemotePath, location

SHARDS, EACH, TOKENS = 6, 5, 100
INDICES = {"megatron": ".idx", "datatrove": ".index"}
"""Suffix of the files that tell where documents are, in formats that have such files."""
SHARD_GIB = EACH * TOKENS * 2 / 2**30
WINDOW = 2 * SHARD_GIB


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Attempts follow each other at once, and the store is empty."""
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.0)
    ObjectStore.reset()
    yield
    ObjectStore.reset()


@pytest.fixture(params=["memory", "store", "file"])
def shards(request, tmp_path):
    """Shards in a store; document d holds the token d."""
    written = write_shards(tmp_path / "written")
    if request.param == "file":
        yield location(f"file://{written}")
        return
    folder = location(f"{request.param}://{uuid.uuid4().hex}/tokens")
    for file in written.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    yield folder
    folder.remove()


@pytest.fixture
def own_store(tmp_path):
    """The same in the store that counts and fails."""
    return upload(write_shards(tmp_path / "written"))


def write_shards(folder):
    folder.mkdir()
    tables = []
    for shard in range(SHARDS):
        writer = ShardWriter(folder / f"part-{shard}.tokens", "uint16")
        for document in range(shard * EACH, (shard + 1) * EACH):
            writer.add(np.full(TOKENS, document))
        tables.append(writer.close())
    write_index(folder, "torchtitan", tables)
    return folder


def opened(path, cache, **settings):
    settings = {"shuffle_window": WINDOW, "cache_limit": 2 * WINDOW} | settings
    return open_tokens(path, OwnFormat(), ByteTokenizer(), 256, cache, **settings)


def copies(cache):
    return sorted(path for path in (cache / "files").glob("*/*"))


def test_an_epoch_fetches_every_shard_once_and_stays_within_the_limit(shards, tmp_path):
    cache = tmp_path / "cache"
    documents = opened(shards, cache)
    assert isinstance(shards, RemotePath)
    assert documents.windows == [0, 10, 20, 30]
    assert not copies(cache)  # no shard is fetched before it is needed
    order = drawn_order(documents.windows, 1, 0, shuffle=True)
    places = np.arange(len(documents))
    read = []
    for document in order.at(places).tolist():
        tokens = documents.read(document)
        assert (tokens == document).all()
        assert len(tokens) == TOKENS
        read.append(document)
        assert 0 < sum(copy.stat().st_size for copy in copies(cache)) <= 2 * WINDOW * 2**30
    assert sorted(read) == places.tolist()
    assert read != places.tolist()


def test_the_copy_that_was_used_longest_ago_leaves(own_store, tmp_path):
    for number, document in enumerate((0, 5, 10, 15, 0, 20)):
        opened(own_store, tmp_path / "cache").read(document)
        for copy in copies(tmp_path / "cache")[number:4]:
            os.utime(copy, (number, number))
    assert [copy.name[5] for copy in copies(tmp_path / "cache")] == ["0", "2", "3", "4"]


def test_each_request_is_made_once(own_store, tmp_path):
    for _run in range(2):
        documents = opened(own_store, tmp_path / "cache", cache_limit=1.0)
        for document in range(len(documents)):
            documents.read(document)
    bytes_of_shards = SHARDS * EACH * TOKENS * 2
    requests = [path for method, path, _ in ObjectStore.requests if method == "cat_file"]
    read = [path for path in requests if not path.endswith("index.json")]
    assert len(read) == len(set(read)) == SHARDS + 3  # the index is fetched once, too
    assert bytes_of_shards < ObjectStore.bytes_read() < bytes_of_shards + 10_000


def test_order_does_not_depend_on_the_limit_of_the_cache(own_store, tmp_path):
    small = opened(own_store, tmp_path / "a")
    assert small.windows == opened(own_store, tmp_path / "b", cache_limit=100.0).windows
    with pytest.raises(ConfigError, match=r"cannot hold two windows .* lower data.shuffle_window"):
        opened(own_store, tmp_path / "c", cache_limit=1.9 * WINDOW)
    with pytest.raises(ConfigError, match="a window has at least one shard"):
        opened(own_store, tmp_path / "d", shuffle_window=1e-9, cache_limit=SHARD_GIB)
    everything = opened(own_store, tmp_path / "e", shuffle_window=1.0, cache_limit=6 * SHARD_GIB)
    assert everything.windows == [0, 30]
    on_disk = opened(tmp_path / "written", tmp_path / "f", shuffle_window=None)
    assert on_disk.windows == [0, 30]
    assert opened(tmp_path / "written", tmp_path / "f").windows == small.windows


def test_a_deleted_copy_can_be_read_until_it_is_closed(own_store, tmp_path):
    documents = opened(own_store, tmp_path / "cache")
    first = documents.read(0)
    (copy,) = copies(tmp_path / "cache")
    copy.unlink()
    assert (documents.read(1) == 1).all()
    assert (first == 0).all()
    documents.read(15)  # closes the copies of the first window
    assert (documents.read(2) == 2).all()
    assert copy.exists()


def test_changed_shards_are_fetched_again(own_store, tmp_path):
    assert (opened(own_store, tmp_path / "cache").read(0) == 0).all()
    other = tmp_path / "other"
    other.mkdir()
    writer = ShardWriter(other / "part-0.tokens", "uint16")
    for _document in range(SHARDS * EACH):
        writer.add(np.full(TOKENS // SHARDS, 7))
    write_index(other, "torchtitan", [writer.close()])
    for file in other.iterdir():
        (own_store / file.name).write_bytes(file.read_bytes())
    assert (opened(own_store, tmp_path / "cache").read(0) == 7).all()


def test_a_shard_that_vanishes_is_named(own_store, tmp_path):
    documents = opened(own_store, tmp_path / "cache")
    documents.read(0)
    (own_store / "part-1.tokens").unlink()
    with pytest.raises(ConfigError, match=r"written/part-1.tokens: there is no such file"):
        documents.read(5)
    assert [copy.name for copy in copies(tmp_path / "cache")] == ["part-0.tokens"]


def test_a_store_that_fails_is_asked_again(own_store, tmp_path):
    documents = opened(own_store, tmp_path / "cache")
    ObjectStore.break_down("cat_file", within="part-1", times=2)
    assert (documents.read(5) == 5).all()
    ObjectStore.break_down("cat_file", within="part-2")
    with pytest.raises(Unreachable, match=r"cannot fetch store://.*part-2.tokens: .*503 Slow Down"):
        documents.read(10)
    ObjectStore.reset_failures()
    assert (documents.read(10) == 10).all()


def test_no_part_of_a_shard_has_its_name(own_store, tmp_path, monkeypatch):
    documents = opened(own_store, tmp_path / "cache")
    shard = own_store / "part-0.tokens"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    with pytest.raises(ConfigError, match=r"part-0.tokens: has 998 bytes; wanted 1,000"):
        documents.read(0)
    shard.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "cat_file", lambda *_, **__: content[:-2])
        with pytest.raises(Unreachable, match=r"part-0.tokens: it has fewer than"):
            documents.read(0)
    assert not copies(tmp_path / "cache")
    assert (documents.read(0) == 0).all()


def test_a_full_disk_is_an_error(own_store, tmp_path, monkeypatch):
    documents = opened(own_store, tmp_path / "cache")
    for name in ("fsync", "posix_fallocate", "ftruncate"):
        monkeypatch.setattr(os, name, partial(fail, errno.ENOSPC))
        with pytest.raises(ConfigError, match=r"files/.*: No space left on device; .* data.cache"):
            documents.read(0)
        assert not copies(tmp_path / "cache")
    monkeypatch.undo()
    assert (documents.read(0) == 0).all()


def test_what_killed_processes_left_is_replaced_or_deleted(own_store, tmp_path):
    documents = opened(own_store, tmp_path / "cache")
    documents.read(0)
    (copy,) = copies(tmp_path / "cache")
    half, other = copy.with_name("part-1.tokens.unfinished"), copy.with_name("other.unfinished")
    half.write_bytes(b"half")
    other.write_bytes(bytes(int(WINDOW * 2**30)))
    os.utime(other, (0, 0))
    assert (documents.read(5) == 5).all()
    for document in (10, 15):
        documents.read(document)
    assert not half.exists()
    assert not other.exists()


def read_all(folder, cache, seed):
    documents = opened(location(folder), cache)
    order = drawn_order(documents.windows, seed, 0, shuffle=True)
    for document in order.at(np.arange(len(documents))).tolist():
        assert (documents.read(document) == document).all()


def test_processes_share_the_cache(tmp_path):
    """Their orders differ, so that they delete what others need."""
    folder = f"file://{write_shards(tmp_path / 'written')}"
    context = multiprocessing.get_context("fork")
    arguments = [(folder, tmp_path / "cache", seed) for seed in range(4)]
    processes = [context.Process(target=read_all, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert sum(copy.stat().st_size for copy in copies(tmp_path / "cache")) <= 2 * WINDOW * 2**30


def upload(local):
    """Copy a folder to a store."""
    folder = location(f"store://{uuid.uuid4().hex}/{local.name}")
    for file in local.rglob("*"):
        if file.is_file():
            (folder / file.relative_to(local)).write_bytes(file.read_bytes())
    ObjectStore.requests.clear()
    return folder


@pytest.mark.parametrize("name", [name for name in TOKEN_FORMATS if name != "auto"])
def test_shards_of_other_software_are_read_from_a_store(name, tmp_path):
    """Only what tells where documents are is fetched first, if it is not in the shards."""
    format, tokens = TOKEN_FORMATS[name](), np.arange(1, 70, dtype=np.uint16)
    parts = [[tokens[: 49 + n] for n in numbers] for numbers in (range(10), range(10, 20))]
    local = token_shards.write_format(tmp_path / "local", name, parts, "uint16")
    tokenizer = ByteTokenizer()
    here = open_tokens(local, format, tokenizer, 256, None)
    for record in (None, partial(record_all, processes=2)):
        cache = tmp_path / f"cache-{record}"
        there = open_tokens(upload(local), format, tokenizer, 256, cache, record=record)
        if name in INDICES and not record:
            assert {copy.suffix for copy in copies(cache)} == {INDICES[name]}
        assert there.fingerprint == here.fingerprint
        assert len(there) == len(here)
        for document in range(len(here)):
            assert (there.read(document) == here.read(document)).all()


def test_a_run_reads_the_same_samples_from_a_store_and_a_disk(tmp_path):
    local = token_shards.write_shards(tmp_path / "web", token_shards.drawn_documents(100), 8)
    there = {"dataset": str(upload(local)), "cache": str(tmp_path / "cache")}
    config = DataConfig(**there, shuffle_window=1e-6)
    on_disk = config.model_copy(update={"dataset": str(local)})
    (stream,) = token_shards.token_streams(config, 1)
    samples = token_shards.rows([stream], 60)
    for ranks in (1, 2):
        streams = token_shards.token_streams(on_disk, ranks)
        assert token_shards.rows(streams, 60) == samples
    everything = on_disk.model_copy(update={"shuffle_window": None})
    (other,) = token_shards.token_streams(everything, 1)
    assert token_shards.rows([other], 60) != samples
    with pytest.raises(ConfigError, match="shuffle_window was 1e-06 GiB and is all documents"):
        other.load_state_dict(token_shards.saved([stream]))
    (resumed,) = token_shards.token_streams(on_disk, 1)
    resumed.load_state_dict(token_shards.saved([stream]))
    assert token_shards.rows([resumed], 5) == token_shards.rows([stream], 5)


def test_the_next_window_is_fetched_ahead_of_time(tmp_path):
    local = token_shards.write_shards(tmp_path / "web", token_shards.drawn_documents(100), 8)
    window = 2 * (local / "shard-00000.tokens").stat().st_size / 2**30
    settings = {"cache": str(tmp_path / "cache"), "shuffle_window": 1.2 * window}
    config = DataConfig(dataset=str(upload(local)), num_workers=0, **settings)
    sources = open_token_sources(config, ByteTokenizer(), 258)
    assert sources is not None
    documents = sources[0].documents
    assert len(documents.windows) == 5
    documents.prefetch(np.array([60, 61, 0, 99]))
    assert documents._prefetcher is not None
    for thread in documents._prefetcher._threads:
        thread.join()
    names = [f"shard-0000{number}.tokens" for number in (0, 1, 4, 5)]
    assert [copy.name for copy in copies(tmp_path / "cache")] == names
    shutil.rmtree(tmp_path / "cache/files")
    (stream,) = token_shards.token_streams(config, 1)
    next(stream)
    for thread in stream._sources[0].documents._prefetcher._threads:
        thread.join()
    assert len(copies(tmp_path / "cache")) == 4


def test_the_cache_holds_two_windows_of_each_source(tmp_path):
    paths = [tmp_path / name for name in ("web", "code")]
    for path in paths:
        token_shards.write_shards(path, token_shards.drawn_documents(100), 8)
    sources = tuple(SourceConfig(path=str(upload(path)), weight=1) for path in paths)
    window = 4 * (paths[0] / "shard-00000.tokens").stat().st_size / 2**30
    settings = {"cache": str(tmp_path / "cache"), "shuffle_window": window}
    config = DataConfig(sources=sources, cache_limit=3 * window, **settings)
    with pytest.raises(ConfigError, match=r"cannot hold two windows of the shards of each source"):
        open_token_sources(config, ByteTokenizer(), 258)
    config = config.model_copy(update={"cache_limit": 5 * window})
    assert len(open_token_sources(config, ByteTokenizer(), 258) or ()) == 2


def test_a_store_that_fails_ends_the_run_with_its_reason(tmp_path):
    local = token_shards.write_shards(tmp_path / "web", token_shards.drawn_documents(100), 2)
    for workers in (0, 2):
        config = DataConfig(
            dataset=str(upload(local)), cache=str(tmp_path / "cache"), num_workers=workers
        )
        (stream,) = token_shards.token_streams(config, 1)
        ObjectStore.break_down("cat_file")
        with pytest.raises(Unreachable, match=r"cannot fetch store://.*503 Slow Down"):
            token_shards.rows([stream], 10)
        stream.close()
        ObjectStore.reset_failures()


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "compressed", "file"])
def test_text_is_fetched_once_and_read_as_from_a_disk(kind, tmp_path):
    local = write_text(tmp_path / "texts", kind)
    url = upload(local)
    if kind == "file":
        local, url = local / "part-1.jsonl", url / "part-1.jsonl"
    config = DataConfig(dataset=str(url), cache=str(tmp_path / "cache"))
    here = open_source(config.model_copy(update={"dataset": str(local)}), None, seed=1)
    for _ in range(2):
        there = open_source(config, None, seed=1)
        assert there.identity == here.identity
        expected, found = (
            [document for _, document in zip(range(9), each.read({0: None}, 1)[0], strict=False)]
            for each in (here, there)
        )
        assert found == expected
    read = [path for method, path, _ in ObjectStore.requests if method == "cat_file"]
    assert len(read) == len(set(read)) == (1 if kind == "file" else 3)
    small = config.model_copy(update={"cache_limit": 1e-9})
    with pytest.raises(ConfigError, match=r"of text, more than data.cache_limit .* data tokenize"):
        open_source(small, None, seed=1)
    check_local(config)
    gone = config.model_copy(update={"dataset": f"store://no-{uuid.uuid4().hex}/gone"})
    for call in (check_local, lambda each: open_source(each, None, seed=1)):
        with pytest.raises(ConfigError, match="/gone: there is no such file or folder"):
            call(gone)


def test_copies_of_text_count_in_the_limit_and_old_versions_leave(tmp_path):
    def fetched(name, content=None):
        file = tmp_path / "store" / name / "a.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            file.write_text(content)
        return fetch_all(location(f"file://{file.parent}"), tmp_path / "cache", 3000)

    versions = [fetched("one", f"{number}" * 1000) for number in range(3)]
    assert [path.exists() for path in versions] == [False, False, True]
    assert fetched("one") == versions[2]
    other = fetched("other", "o" * 1000)
    shards = tmp_path / "cache/files/shards"
    shards.mkdir(parents=True)
    for number in range(2):
        (shards / f"{number}").write_bytes(bytes(1000))
        os.utime(shards / f"{number}", (number, number))
    third = fetched("third", "t" * 1000)
    # What this process reads stays; of the rest, the shards used longest ago leave.
    assert all(path.exists() for path in (versions[2], other, third))
    assert list(shards.iterdir()) == []
    context = multiprocessing.get_context("fork")
    file_cache._text_in_use.cache_clear()  # as in another process, later
    process = context.Process(target=fetched, args=("fourth", "f" * 2000))
    process.start()
    process.join(60)
    assert not versions[2].exists()
    assert not other.exists()
    assert third.exists()


def write_text(folder, kind):
    suffix = {"text": ".txt", "parquet": ".parquet", "compressed": ".jsonl.gz"}.get(kind, ".jsonl")
    for number in range(3):
        file = folder / ("more" if number == 2 else "") / f"part-{number}{suffix}"
        token_shards.write_texts(file, [f"document {number}.{n}\n" for n in range(4)])
    return folder


def test_an_index_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    """The folder of the data is often one that must not be written."""
    format = TOKEN_FORMATS["megatron"]()
    shards = [[np.arange(9, dtype=np.uint16)]]
    folder = token_shards.write_format(tmp_path / "shards", "megatron", shards, "uint16")
    (folder / ".torchtitan").write_text("no folder")
    with pytest.raises(ConfigError, match=r"\.torchtitan: File exists"):
        open_tokens(folder, format, ByteTokenizer(), 256, None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", partial(fail, errno.EROFS))
        with pytest.raises(ConfigError, match=r"cache: Read-only file system; .* set data.cache"):
            open_tokens(folder, format, ByteTokenizer(), 256, tmp_path / "cache")
    monkeypatch.setattr(index_cache, "write_index", partial(fail, errno.ENOSPC))
    with pytest.raises(ConfigError, match=r"No space left on device; .* set data.cache"):
        open_tokens(folder, format, ByteTokenizer(), 256, tmp_path / "cache")


def fail(code, *_, **__):
    raise OSError(code, os.strerror(code))
