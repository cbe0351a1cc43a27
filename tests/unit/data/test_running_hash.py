"""The running hash of the samples of a run: its definition, and that no layout changes it."""

import json

import numpy as np
import pytest
import xxhash

from tests.token_shards import drawn_documents, rows, token_streams, write_shards
from tests.token_shards import saved as token_state
from tests.unit.data.test_stream import saved, steps, streams
from torchtitan.data import DataConfig
from torchtitan.data.order import hash_text, merged_hash


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": f"{n}: " + "ab" * (n % 30)}) for n in range(40)]
    path.write_text("\n".join(lines))
    return path


def expected(samples, first=0):
    hashes = [
        xxhash.xxh3_64_intdigest(np.array(tokens, "<i4").tobytes(), seed=number)
        for number, tokens in enumerate(samples, first)
    ]
    return f"{sum(hashes) % 2**64:016x}"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_is_that_of_tokenized_samples_too(tmp_path, ranks):
    shards = write_shards(tmp_path / "shards", drawn_documents(50))
    of = token_streams(DataConfig(dataset=str(shards), num_workers=ranks - 1), ranks)
    samples = rows(of, 6)
    state = token_state(of)
    assert state["hash"] == expected(samples)
    resumed = token_streams(DataConfig(dataset=str(shards)), 2)
    for stream in resumed:
        stream.load_state_dict(json.loads(json.dumps(state)))
    assert token_state(resumed)["hash"] == expected(samples)
    samples += rows(resumed, 2)
    assert token_state(resumed)["hash"] == expected(samples)
    for stream in (*of, *resumed):
        stream.close()


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(1, {}), (2, {"num_workers": 2}), (4, {}), (2, {"accumulation": 2}), (1, {"lanes": 8})],
    ids=str,
)
def test_it_is_the_sum_over_samples_by_their_number(texts, ranks, settings):
    of = streams(texts, ranks, batch=4, **settings)
    read = steps(of, 3, settings.get("accumulation", 1))
    samples = [sample for step in read for sample in step]
    assert saved(of)["hash"] == expected(samples)
    assert hash_text(sum(stream.hash.term or 0 for stream in of)) == expected(samples)
    for stream in of:
        stream.close()


def test_a_resumed_run_continues_it_on_other_ranks_and_lengths(texts):
    of = streams(texts, 2)
    before = [sample for step in steps(of, 2) for sample in step]
    state = saved(of)
    resumed = streams(texts, 4, seq_len=24)
    for stream in resumed:
        stream.load_state_dict(state)
    after = [sample for step in steps(resumed, 2) for sample in step]
    one, other = int(expected(before), 16), int(expected(after, first=len(before)), 16)
    assert saved(resumed)["hash"] == hash_text(one + other)


def test_it_is_unknown_after_a_checkpoint_without_it(texts):
    (stream,) = streams(texts, 1)
    steps([stream], 2)
    state = saved([stream])
    del state["hash"]
    stream.load_state_dict(state)
    steps([stream], 1)
    assert stream.hash.term is None
    assert saved([stream])["hash"] is None


def test_it_starts_over_where_the_stream_does(texts):
    (stream,) = streams(texts, 1)
    steps([stream], 2)
    stream.rewind()
    read = steps([stream], 1)[0]
    assert saved([stream])["hash"] == expected(read)
    stream.skip(8)
    read = steps([stream], 1)[0]
    assert saved([stream])["hash"] == expected(read, first=8)


def test_copies_of_a_data_rank_count_once():
    first = {"before": hash_text(5), "ranks": {"0": 2**63}}
    other = {"before": hash_text(5), "ranks": {"1": 2**63 + 1}}
    assert merged_hash([first, first, other, other]) == hash_text(6)
