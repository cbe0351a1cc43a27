"""The recipes of mixtures: shares of their sources, and data that a machine does not have."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from torchtitan.checks import load_job
from torchtitan.config import ConfigError
from torchtitan.data.tokens.index import ShardTable, write_index
from torchtitan.data.tokens.token_stream import TokenStream
from torchtitan.inputs import open_stream, open_task

FOLDER = Path(__file__).parents[2] / "train_configs"
OLMO = FOLDER / "mixtures/olmo2_8b.toml"
BILLIONS = {
    "dclm": 3700,
    "starcoder": 83.0,
    "pes2o": 58.6,
    "arxiv": 20.8,
    "open-web-math": 12.2,
    "algebraic-stack": 11.8,
    "wiki": 3.66,
}


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
