"""`torchtitan data inspect`: samples of each kind of data, as a run reads them."""

import json

import numpy as np
import pytest

from tests import tiny
from tests.ranks import run_ranks
from tests.token_shards import drawn_documents, write_shards, write_texts
from torchtitan.data.order import Document, Position, hash_text, sample_hash
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.provenance import to_toml
from torchtitan.tools.cli import main
from torchtitan.tools.inspect import UncollatedTokens

TEXTS = [f"{n}: " + "ab" * n for n in range(1, 30)]


@pytest.fixture
def recipes(tmp_path):
    """A recipe of each kind of data."""
    texts = write_texts(tmp_path / "texts.jsonl", TEXTS)
    web = str(write_shards(tmp_path / "web", drawn_documents(60)))
    sources = [{"path": web, "weight": 3, "repeat": True}]
    sources += [{"path": str(texts), "weight": 1, "repeat": True}]
    kinds = {
        "online": {"dataset": str(texts)},
        "tokenized": {"dataset": web},
        "mixture": {"sources": sources},
    }
    for name, data in kinds.items():
        job = tiny.job(tmp_path / name, data=data, training={"steps": 2})
        (tmp_path / f"{name}.toml").write_text(to_toml(job))
    return {name: tmp_path / f"{name}.toml" for name in kinds}


@pytest.mark.parametrize("kind", ["online", "tokenized", "mixture"])
def test_json_has_the_samples_that_a_run_reads(kind, recipes, tmp_path, capsys, says):
    words = ["data", "inspect", str(recipes[kind]), "--json", "--samples"]
    assert main([*words, "1"]) == 0  # tokenizes text, which the forked rank cannot
    run_ranks(main, 1, ["train", str(recipes[kind])])
    rows = (tmp_path / kind / "metrics.jsonl").read_text().splitlines()
    [last] = [row for row in map(json.loads, rows) if row["step"] == 2]
    capsys.readouterr()
    samples = [json.loads(line) for line in says(*words, last["samples"]).splitlines()]
    assert [sample["index"] for sample in samples] == list(range(last["samples"]))
    hashes = [sample_hash(s["index"], np.array(s["tokens"])) for s in samples]
    assert hash_text(sum(hashes)) == last["data_hash"]
    assert all(sum(sample["documents"]) == len(sample["tokens"]) for sample in samples)
    later = [json.loads(line) for line in says(*words, "2", "--from", "5").splitlines()]
    assert later == samples[5:7]
    names = {sample["source"] for sample in samples}
    assert len(names) == (2 if kind == "mixture" else 1)
    if kind == "mixture":
        assert names == {"web", "texts.jsonl"}
        assert sum(sample["source"] == "web" for sample in samples) == 0.75 * len(samples)


def test_the_page_shows_documents_and_sources(recipes, says):
    words = ["data", "inspect", str(recipes["mixture"]), "--samples", "8", "--training.steps=100"]
    text = says(*words)
    told = ("== sample 7, source ", "-- document 2 of ", "<|begin_of_text|>", "of the run (75.0%)")
    for each in (*told, "fingerprint of the tokenizer: bytes", "fingerprint of web: "):
        assert each in text


def test_images_are_refused(says):
    assert "whose data is not text" in says("data", "inspect", "vit_mae_debug", status=2)


def test_samples_take_the_ids_that_the_model_takes():
    """Documents of tokens may have ids beyond the tokenizer's, if the model has rows for them."""
    documents = iter([Document(Position(0, 0), np.array([270, 270, 270]))])
    packing = UncollatedTokens(ByteTokenizer(), 2, True, True, has_documents=False, vocab_size=300)
    batch = packing.collate([packing.lane(0, documents, None).next_sample()])
    assert batch.samples[0].tokens.tolist() == [256, 270, 270]
