"""The recipes of mixtures: shares of their sources, and data that a machine does not have."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.token_shards import drawn_documents, write_shards
from torchtitan.checks import load_job
from torchtitan.config import ConfigError
from torchtitan.data.tokens.index import ShardTable, write_index
from torchtitan.data.tokens.token_stream import TokenStream
from torchtitan.inputs import open_stream, open_task, problems_of_stream
from torchtitan.job import RECIPE_FILE
from torchtitan.trainer import read

FOLDER = Path(__file__).parents[2] / "train_configs"
OLMO = FOLDER / "mixtures/olmo2_8b.toml"
BILLIONS = {"dclm": 3700, "starcoder": 83.0, "pes2o": 58.6, "arxiv": 20.8, "open-web-math": 12.2}
BILLIONS |= {"algebraic-stack": 11.8, "wiki": 3.66}


def test_the_debug_mixture_has_its_shares_in_both_stages(tmp_path):
    words = ["--data.cache", str(tmp_path), "--training.seq_len", "32"]
    job = load_job(FOLDER / "debug_mixture.toml", words, 1, "cpu").config
    degrees = job.degrees(1)
    stream = open_stream(job, open_task(job), degrees, rank=0)
    assert isinstance(stream, TokenStream)
    found = [stream.source(number) for number in range(800)]
    assert Counter(found[:400]) == {"code": 280, "prose": 80, "tables": 40}
    assert Counter(found[400:]) == {"code": 200, "prose": 200}
    assert next(stream).inputs.shape == (8, 32)
    stream.close()


def test_a_machine_without_the_data_is_told_all_that_is_missing():
    with pytest.raises(ConfigError) as raised:
        load_job(OLMO, ["--model.tokenizer_path", "none"], 8, "cpu")
    lines = str(raised.value).splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        f'data.sources.{number}.path: got "assets/tokens/{name}"; there is no such file or folder'
        for number, name in enumerate(BILLIONS)
    ]


def test_the_mixture_of_olmo_reads_each_source_about_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, billions in BILLIONS.items():
        lengths = np.full(1000, int(1e6 * billions), np.uint32)
        starts = 4 * np.cumsum(lengths, dtype=np.uint64)
        size = 4 * int(lengths.sum(dtype=np.int64))
        table = ShardTable("0.tokens", size, "uint32", starts, lengths)
        folder = tmp_path / "assets/tokens" / name
        folder.mkdir(parents=True)
        write_index(folder, "torchtitan", [table])
    job = load_job(OLMO, ["--model.tokenizer_path", "none"], 8, "cpu").config
    weights = {source.label: source.weight for source in job.data.sources}
    assert weights == BILLIONS
    tokens = job.training.steps * job.global_batch(job.degrees(8)) * job.training.seq_len
    assert 0.95 < tokens / (1e9 * sum(BILLIONS.values())) < 1


@pytest.mark.parametrize(
    ("text", "stored", "message"),
    [
        ("weight = 1", "weight = 1", '1: "stored" has 3,018 tokens, and the run takes 3,200'),
        ("epochs = 1", "tokens = 9000", "have at least 8,992 tokens, and the run trains on 6,400"),
        ("tokens = 9000", "epochs = 1", "have 12,000 tokens, and the run trains on 6,400"),
        ("tokens = 9", "weight = 1", '"prose" has fewer tokens than a sample of 16'),
        ("weight = 1", 'weight = 1\nformat.name = "mds"', "stored"),
    ],
)
def test_amounts_are_refused_before_text_is_tokenized(text, stored, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path / "stored", drawn_documents(100))
    (tmp_path / "prose").mkdir()
    (tmp_path / "prose/a.txt").write_text("words " * 1000)
    template = Path(__file__).with_name("text_and_tokens.txt").read_text()
    Path("recipe.toml").write_text(template.format(text, stored))
    with pytest.raises(ConfigError) as raised:
        read(["recipe.toml"], 1, "cpu", local_ranks=1)
    assert message in str(raised.value)
    job = load_job("recipe.toml", [], 1, "cpu").config
    found = problems_of_stream(job, 1, is_new=True, tokenizes=False)
    assert message in "".join(f"{problem.path}: {problem.message}" for problem in found)
    assert not list(tmp_path.rglob("tokens-*"))
    # A run before it may have read its part.
    Path("run").mkdir()
    Path("run", RECIPE_FILE).touch()
    if message != "stored":
        read(["recipe.toml"], 1, "cpu", local_ranks=1)
        assert list(tmp_path.rglob("tokens-*"))
