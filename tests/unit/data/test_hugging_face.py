"""Streamed and downloaded Hugging Face sets, from local files: no network is used."""

import gzip
import json

import pytest

from tests.token_shards import resume, saved, stream_of
from torchtitan.config import ConfigError, Unreachable
from torchtitan.data import DATASETS, DataConfig, load_tokenizer, open_source, sources
from torchtitan.data.sources import ShuffledDocuments
from torchtitan.data.streaming import DownloadedDocuments, StreamedDocuments, load_hub
from torchtitan.data.tokens.index import TokenDocuments
from torchtitan.data.tokens.tokenizing import tokenize


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_shards(folder, shards, documents=7):
    """JSONL files of slightly different lengths; returns all texts."""
    folder.mkdir(exist_ok=True)
    texts = []
    for shard in range(shards):
        rows = [f"{shard}.{number} " + "w" * number for number in range(documents + shard % 3)]
        texts += rows
        lines = [json.dumps({"text": text, "url": "-"}) + "\n" for text in rows]
        (folder / f"{shard:03}.jsonl").write_text("".join(lines))
    return texts


def streamed(folder, *, shuffle=True, text_key="text"):
    import datasets

    files = [str(file) for file in sorted(folder.glob("*.jsonl"))]
    dataset = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    return StreamedDocuments("local", "files", dataset, text_key, seed=5, shuffle=shuffle)


def first_epoch(source, lanes):
    return {
        lane: list(texts_of_epoch(source, documents))
        for lane, documents in source.read(dict.fromkeys(range(lanes)), lanes).items()
    }


def texts_of_epoch(source, documents):
    for document in documents:
        if source.epoch(document.position):
            return
        yield document.content


@pytest.mark.parametrize(("shards", "lanes"), [(6, 3), (5, 2), (4, 4), (3, 4), (1, 3)])
def test_every_document_once_an_epoch(tmp_path, shards, lanes):
    texts = write_shards(tmp_path, shards)
    source = streamed(tmp_path)
    read = first_epoch(source, lanes)
    assert sorted(text for lane in read.values() for text in lane) == sorted(texts)
    assert all(read.values())
    assert (source.advice(lanes) is None) == (shards >= lanes)


def test_epochs_shuffle_the_shards(tmp_path):
    texts = write_shards(tmp_path, 6)
    both = (streamed(tmp_path, shuffle=shuffle).read({0: None}, 1)[0] for shuffle in (False, True))
    in_order, shuffled = ([next(documents).content for _ in texts * 2] for documents in both)
    assert in_order == texts * 2
    first, second = shuffled[: len(texts)], shuffled[len(texts) :]
    assert sorted(first) == sorted(second) == sorted(texts)
    assert first != second != texts


@pytest.mark.parametrize("shards", [8, 2])
def test_resume_at_any_document(tmp_path, shards):
    write_shards(tmp_path, shards)
    source = streamed(tmp_path)
    lanes = dict.fromkeys(range(4))
    read = {lane: [next(d) for _ in range(12)] for lane, d in source.read(lanes, 4).items()}
    for at in range(0, 10, 3):
        # Lanes stand at different places, and other lanes belong to another rank.
        starts = {lane: read[lane][at + lane % 2].position for lane in (1, 2)}
        for lane, documents in source.read(starts, 4).items():
            assert next(documents) == read[lane][at + lane % 2]
            assert next(documents) == read[lane][at + lane % 2 + 1]


def stream(source, rank, ranks, workers=0):
    config, part = DataConfig(num_workers=workers), {"local_batch_size": 4 // ranks}
    part |= {"rank": rank, "ranks": ranks}
    return stream_of(config, source, load_tokenizer(None), seq_len=20, **part)


@pytest.mark.parametrize("shards", [8, 3])
def test_batches_and_resume_do_not_depend_on_the_layout(tmp_path, shards):
    write_shards(tmp_path, shards)
    source = streamed(tmp_path)

    def steps(of, count):
        return [[row for s in of for row in next(s).tokens.tolist()] for _ in range(count)]

    one = steps([stream(source, 0, 1)], 12)
    two = [stream(source, rank, 2, workers=rank) for rank in range(2)]
    assert steps(two, 5) == one[:5]
    four = resume([stream(source, rank, 4) for rank in range(4)], saved(two))
    assert steps(four, 7) == one[5:]


def test_compressed_jsonl_is_streamed(tmp_path):
    for number in range(3):
        with gzip.open(tmp_path / f"c4-{number}.json.gz", "wt") as file:
            file.write(json.dumps({"text": f"from {number}"}) + "\n")
    for dataset, path in [(str(tmp_path), None), ("jsonl", str(tmp_path)), ("c4", str(tmp_path))]:
        config = DataConfig(dataset=dataset, dataset_path=path)
        source = open_source(config, load_tokenizer(None), seed=0)
        assert isinstance(source, StreamedDocuments)
        assert sorted(first_epoch(source, 1)[0]) == ["from 0", "from 1", "from 2"]
    one = DataConfig(dataset="jsonl", dataset_path=str(tmp_path / "c4-1.json.gz"))
    assert first_epoch(open_source(one, load_tokenizer(None), seed=0), 1)[0] == ["from 1"]


def test_downloaded_sets_are_read_in_any_order(tmp_path):
    import datasets

    texts = write_shards(tmp_path, 2)
    dataset = datasets.Dataset.from_dict({"text": texts, "id": list(range(len(texts)))})
    documents = DownloadedDocuments("c4", dataset, "text")
    read = first_epoch(ShuffledDocuments("c4", documents, seed=0, shuffle=True), 1)[0]
    assert sorted(read) == sorted(texts) != read
    with pytest.raises(ConfigError, match=r"c4: no column 'body' .*it has text, id"):
        DownloadedDocuments("c4", dataset, "body")


def test_rows_without_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": null}\n')
    documents = streamed(tmp_path).read({0: None}, 1)[0]
    assert next(documents).content == "fine"
    message = r"local: shard 1, document 2: 'text' is null; set data"
    with pytest.raises(ConfigError, match=message):
        next(documents)
    with pytest.raises(ConfigError, match=r"no (key|column) 'body'"):
        next(streamed(tmp_path, text_key="body").read({0: None}, 1)[0])


def test_a_stream_without_documents():
    import datasets

    one = datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset()
    empty = one.filter(lambda _: False)
    source = StreamedDocuments("empty", "empty", empty, "text", seed=0, shuffle=True)
    with pytest.raises(ConfigError, match="empty has no documents"):
        next(source.read({0: None}, 1)[0])


def test_a_network_that_fails_in_the_middle_is_a_message(tmp_path):
    write_shards(tmp_path, 1)

    class Lost(Exception):
        """Of an HTTP client, which is no OSError."""

    def fail(row):
        raise Lost("connection reset")

    source = streamed(tmp_path, shuffle=False)
    source._dataset = source._dataset.map(fail)
    documents = source.read({0: None}, 1)[0]
    with pytest.raises(Unreachable, match=r"local: shard 1 cannot be read: Lost: connection reset"):
        next(documents)


def test_no_network_is_told_with_a_way_out():
    with pytest.raises(Unreachable, match=r"cannot reach the data set allenai/c4 .*dataset_path"):
        load_hub(DATASETS["c4"], streaming=True)


def test_no_lane_starves_when_there_are_fewer_documents_than_lanes(tmp_path):
    write_shards(tmp_path, 1, documents=2)
    lanes = streamed(tmp_path).read(dict.fromkeys(range(4)), 4)
    firsts = {lane: next(documents).position for lane, documents in lanes.items()}
    assert firsts == {0: (0, 0), 1: (0, 1), 2: (1, 1), 3: (2, 1)}


@pytest.mark.parametrize("streaming", [True, False])
def test_a_set_of_the_hub_is_tokenized_in_its_order(streaming, tmp_path, monkeypatch):
    import datasets

    texts = write_shards(tmp_path / "data", 3)
    files = [str(file) for file in sorted((tmp_path / "data").glob("*.jsonl"))]
    found = datasets.load_dataset("json", data_files=files, split="train", streaming=streaming)
    monkeypatch.setattr(sources, "load_hub", lambda *_, **settings: found)
    config = DataConfig(dataset="c4", streaming=streaming)
    for processes in (1, 2):
        folder = tmp_path / f"tokens{processes}"
        about = tokenize(config, load_tokenizer(None), folder, processes=processes)
        assert len(about.shards) > 1
        read = TokenDocuments(folder, folder, 258)
        tokens = [read.read(number).tolist() for number in range(len(read))]
        assert tokens == [[256, *text.encode(), 257] for text in texts]
