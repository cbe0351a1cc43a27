"""The stream: one order for every layout, nothing lost or repeated, exact resume; its hash."""

import dataclasses
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import xxhash

from tests import registries, token_shards
from tests.token_shards import build_stream, resume, saved
from torchtitan.config import ConfigError
from torchtitan.data import DataConfig, load_tokenizer, merge_states, open_source
from torchtitan.data import lanes as lanes_module
from torchtitan.data.order import hash_text, merged_hash
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.tasks.next_token import preview, unigram_loss

SEQ_LEN = 16
BOS, EOS = 256, 257


@pytest.fixture
def texts(tmp_path):
    """27 documents of very different lengths; the 10th is empty."""
    lengths = np.random.default_rng(0).integers(1, 90, 27).tolist()
    contents = [f"{n}:" + "abcdefgh"[n % 8] * length for n, length in enumerate(lengths)]
    return token_shards.write_texts(tmp_path / "texts.jsonl", [*contents[:10], "", *contents[11:]])


def streams(path, ranks, *, batch=4, accumulation=1, groups=1, **settings):
    """The streams of all ranks, of a global batch of `batch`."""
    options = {"dataset": str(path), "num_workers": 0, **settings}
    of = {"seed": options.pop("seed", 3), "seq_len": options.pop("seq_len", SEQ_LEN)}
    of |= {"local_batch_size": batch // ranks // accumulation, "accumulation": accumulation}
    of |= {"ranks": ranks, "groups": groups}
    parts = (DataConfig(**options), load_tokenizer(None))
    return [build_stream(*parts, rank=rank, **of) for rank in range(ranks)]


def steps(of, count, accumulation=1):
    """The samples of each of `count` steps, in global order."""
    result = []
    for _ in range(count):
        batches = [next(stream) for stream in of for _ in range(accumulation)]
        result.append([row for batch in batches for row in rows(batch)])
    return result


def rows(batch):
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    return torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1).tolist()


def test_a_batch_is_ids_and_the_ids_after_them(texts):
    (stream,) = streams(texts, 1)
    batch = next(stream)
    assert batch.tokens.shape == batch.targets.shape == (4, SEQ_LEN)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.tokens[:, 0].tolist() == [BOS] * 4
    assert int(batch.count()) == 4 * SEQ_LEN
    ignored = dataclasses.replace(batch, targets=torch.full_like(batch.targets, -100)).to("cpu")
    assert int(ignored.count()) == 0
    assert iter(stream) is stream


@pytest.mark.parametrize("lanes", [-1, 4, 8, 12])
@pytest.mark.parametrize("ranks", [2, 4])
def test_order_does_not_depend_on_the_layout(texts, ranks, lanes):
    one = steps(streams(texts, 1, lanes=lanes), 30)
    assert steps(streams(texts, ranks, lanes=lanes), 30) == one
    accumulated = streams(texts, 2, lanes=lanes, accumulation=2)
    assert steps(accumulated, 30, accumulation=2) == one


@pytest.mark.parametrize("lanes", [-1, 12])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("samples", [4, 8, 21, 43])
def test_samples_that_are_stepped_over_are_those_that_came_first(texts, ranks, lanes, samples):
    """Any number of them, not only whole batches; and the run resumes after that."""
    order = [row for step in steps(streams(texts, 1, lanes=lanes), 30) for row in step]
    skipping = streams(texts, ranks, lanes=lanes)
    for stream in skipping:
        stream.skip(samples)
    assert saved(skipping)["samples"] == samples
    found = [row for step in steps(skipping, 2) for row in step]
    resumed = resume(streams(texts, 2, lanes=lanes), saved(skipping))
    found += [row for step in steps(resumed, 2) for row in step]
    assert found == order[samples : samples + 16]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_do_not_change_the_batches(texts, workers):
    expected = steps(streams(texts, 1, num_workers=0), 20)
    ahead = streams(texts, 1, num_workers=workers, prefetch_factor=3)
    assert steps(ahead, 20) == expected


def lane_rows(samples):
    """The samples of a lane joined again: each begins with the last token of the one before."""
    for before, after in itertools.pairwise(samples):
        assert before[-1] == after[0]
    return [samples[0][0], *(token for sample in samples for token in sample[1:])]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("lanes", [4, 8])
def test_no_token_is_lost_or_repeated(texts, lanes, shuffle):
    served = steps(streams(texts, 2, lanes=lanes, shuffle=shuffle), 60)
    samples = [sample for step in served for sample in step]
    contents = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    for lane in range(lanes):
        row = lane_rows(samples[lane::lanes])
        if not shuffle:
            numbers = range(lane, 10**6, lanes)
            assert row == expected_row((contents[j % 27] for j in numbers), len(row))
        # Whatever the order, the lane holds whole documents, each between BOS and EOS.
        documents = bytes_of(row)
        assert all(document in {c.encode() for c in contents} for document in documents)


def expected_row(contents, length):
    row = []
    while len(row) < length:
        text = next(contents)
        row += [BOS, *text.encode(), EOS] if text else []
    return row[:length]


def bytes_of(row):
    """The whole documents in a row of tokens."""
    documents = []
    for token in row:
        if token == BOS:
            documents.append([])
        elif token != EOS:
            documents[-1].append(token)
    return [bytes(document) for document in documents[:-1]]


def test_an_epoch_reads_each_document_once_and_the_next_in_another_order(texts):
    (stream,) = streams(texts, 1, batch=1, num_workers=0)
    samples = []
    while stream.epoch < 3:
        samples.append(rows(next(stream))[0])
    lines = texts.read_text().splitlines()
    contents = sorted(filter(None, (json.loads(line)["text"].encode() for line in lines)))
    documents = bytes_of(lane_rows(samples))
    epochs = [documents[first : first + 26] for first in (0, 26, 52)]
    assert [sorted(epoch) for epoch in epochs] == [contents] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_seed_sets_the_order(texts):
    one, same, other = (steps(streams(texts, 1, seed=seed), 5) for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_is_exact_after_every_step(texts, workers):
    run = streams(texts, 1, num_workers=workers)
    states, served = [saved(run)], []
    for _ in range(25):
        served += steps(run, 1)
        states.append(saved(run))
    middle = 0
    # Ways to resume are the same with threads, whatever was read ahead.
    chosen = range(20) if not workers else (0, 1, 2, 11, 19)
    for step in chosen:
        state = states[step]
        resumed = resume(streams(texts, 1, num_workers=workers), state)
        assert saved(resumed) == state
        assert steps(resumed, 5) == served[step : step + 5]
        middle += any(record and record[2] for record in state["lanes"])
    assert middle == len(chosen) - 1


def test_resume_on_other_layouts(texts):
    run = streams(texts, 2, lanes=8)
    steps(run, 7)
    state = saved(run)
    flat = [sample for step in steps(run, 12) for sample in step]
    for ranks, batch in [(1, 4), (4, 4), (2, 8), (8, 8), (1, 2), (2, 2), (1, 1)]:
        resumed = resume(streams(texts, ranks, batch=batch), state)
        again = [s for step in steps(resumed, 48 // batch) for s in step]
        assert again == flat, (ranks, batch)
        state_again = saved(resumed)
        assert state_again["samples"] == 28 + 48
        assert state_again["lanes"] == saved(run)["lanes"]


def test_resume_at_another_sequence_length(texts):
    run = streams(texts, 1, batch=1)
    first = [step[0] for step in steps(run, 10)]
    longer = resume(streams(texts, 1, batch=1, seq_len=40), saved(run))
    second = [step[0] for step in steps(longer, 3)]
    whole = [step[0] for step in steps(streams(texts, 1, batch=1), 20)]
    row = lane_rows(first) + lane_rows(second)[1:]
    assert row == lane_rows(whole)[: len(row)]


def test_state_is_what_was_consumed(texts):
    ahead = streams(texts, 1, num_workers=2, prefetch_factor=5)
    within = streams(texts, 1, num_workers=0)
    assert steps(ahead, 3) == steps(within, 3)
    assert saved(ahead) == saved(within)
    assert saved(ahead)["samples"] == 12


def test_the_state_is_taken_between_steps(texts):
    (stream,) = streams(texts, 1, accumulation=2)
    next(stream)
    with pytest.raises(AssertionError, match="between steps"):
        stream.state_dict()


def test_loading_into_a_stream_that_ran(texts):
    run = streams(texts, 1)
    state = saved(run)
    first = steps(run, 4)
    run[0].load_state_dict(state)
    assert steps(run, 4) == first


def test_resume_on_other_data_is_refused(texts):
    run = streams(texts, 2)
    steps(run, 1)
    state = saved(run)
    with pytest.raises(ConfigError, match="seed was 3 and is 4; shuffle was True and is False"):
        streams(texts, 1, seed=4, shuffle=False)[0].load_state_dict(state)
    with pytest.raises(ConfigError, match="add_eos was True and is False"):
        streams(texts, 1, add_eos=False)[0].load_state_dict(state)
    with pytest.raises(ConfigError, match=r"data\.lanes: the run to resume has 4 lanes, not 8"):
        streams(texts, 1, lanes=8)[0].load_state_dict(state)
    with pytest.raises(ConfigError, match=r"8 does not divide the 4 lanes .* one of 1, 2, 4"):
        streams(texts, 1, batch=8)[0].load_state_dict(state)
    texts.write_text(texts.read_text() + '{"text": "one more"}\n')
    with pytest.raises(ConfigError, match=r"documents was 27 and is 28; files was '"):
        streams(texts, 1)[0].load_state_dict(state)


def test_workers_must_share_the_lanes_evenly(texts):
    with pytest.raises(ConfigError, match=r"num_workers: it does not .* 6 lanes .* 0, 1, 2, 3, 6"):
        streams(texts, 2, lanes=12, num_workers=4)
    with pytest.raises(ConfigError, match=r"data\.lanes: it is not a multiple of the 4 sequences"):
        streams(texts, 1, lanes=6)


def test_ranks_with_different_files_are_told(texts, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(texts.read_text() + '{"text": "one more"}\n')
    states = [streams(path, 2)[rank].state_dict() for rank, path in enumerate([texts, other])]
    with pytest.raises(ConfigError, match="ranks read different data"):
        merge_states(states)


def test_fewer_documents_than_lanes(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("first document")
    (tmp_path / "b.txt").write_text("second")
    one = steps(streams(tmp_path, 1, batch=8), 10)
    assert "2 documents for 8 lanes" in caplog.text
    assert steps(streams(tmp_path, 4, batch=8), 10) == one
    resumed, run = streams(tmp_path, 2, batch=8), streams(tmp_path, 1, batch=8)
    steps(run, 6)
    resume(resumed, saved(run))
    assert steps(resumed, 4) == one[6:]


def test_mistakes_in_a_thread_reach_the_step_unchanged(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n{"text": "cut off\n')
    messages = []
    for workers in (0, 1):
        (stream,) = streams(path, 1, batch=2, num_workers=workers, seq_len=64)
        for _ in range(2):
            with pytest.raises(ConfigError) as caught:
                next(stream)
            messages.append(str(caught.value))
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"{path}:2: not a line of JSON")


def test_other_errors_in_a_thread_name_their_cause(texts, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", Mock(side_effect=OSError("lost the disk")))
    (stream,) = streams(texts, 1, num_workers=1)
    with pytest.raises(OSError, match="lost the disk"):
        next(stream)


def test_empty_documents_only(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes_module, "MOST_EMPTY_DOCUMENTS", 50)
    path = tmp_path / "empty.jsonl"
    path.write_text('{"text": ""}\n' * 3)
    (stream,) = streams(path, 1, num_workers=0)
    with pytest.raises(ConfigError, match="50 empty documents in a row"):
        next(stream)


def test_close_ends_the_threads_and_reading_can_go_on(texts):
    others = {*threading.enumerate()}  # which may end meanwhile
    expected = steps(streams(texts, 1, num_workers=0), 6)
    run = streams(texts, 1, num_workers=4)
    served = steps(run, 3)
    assert len({*threading.enumerate()} - others) == 4 + 1, "one joins what the workers read"
    run[0].close()
    assert {*threading.enumerate()} <= others
    run[0].close()
    assert served + steps(run, 3) == expected
    run[0].close()


@pytest.mark.gate
@pytest.mark.costs("a new interpreter")
def test_the_interpreter_exits_cleanly_with_threads_running(texts):
    """It does so three times, in forks of one that has imported what they need."""
    program = f"""
import os, sys, time, torch
from tests.token_shards import build_stream
from torchtitan.data import DataConfig, load_tokenizer
ending = None
for each in ("", "raise SystemExit(3)", "stream.load_state_dict({{}})"):
    if not os.fork():
        ending = each
        break
    status = os.waitstatus_to_exitcode(os.wait()[1])
    print(f"[{{each}}] {{status}}", flush=True)
    print(f"[{{each}}]", file=sys.stderr, flush=True)
if ending is not None:
    stream = build_stream(
        DataConfig(dataset={str(texts)!r}, num_workers=2, prefetch_factor=9), load_tokenizer(None),
        seed=0, seq_len=64, local_batch_size=4, accumulation=1, rank=0, ranks=1,
    )
    def slowly(packing, samples, collate=type(stream._packing).collate):
        until = time.monotonic() + 1
        while time.monotonic() < until:
            torch.ones(10**6).sum()
        return collate(packing, samples)
    type(stream._packing).collate = slowly
    print(next(stream).tokens.shape)
    exec(ending)
"""
    words = [sys.executable, "-W", "error", "-c", program]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=environment)
    statuses = {"": 0, "raise SystemExit(3)": 3, "stream.load_state_dict({})": 1}
    shape = "torch.Size([4, 64])\n"
    assert done.stdout == "".join(f"{shape}[{each}] {code}\n" for each, code in statuses.items())
    first, failed = done.stderr.split("[raise SystemExit(3)]\n")
    assert first == "[]\n"
    assert failed.endswith("KeyError: 'identity'\n[stream.load_state_dict({})]\n")
    assert failed.count("Error") == 1
    assert done.returncode == 0


def test_synthetic_tokens_are_a_function_of_the_seed():
    one = steps(streams("synthetic", 1, seq_len=3000), 3)
    assert steps(streams("synthetic", 4, seq_len=3000), 3) == one
    assert steps(streams("synthetic", 1, seq_len=3000, seed=9), 3) != one
    run = streams("synthetic", 2, seq_len=3000)
    steps(run, 2)
    resumed = resume(streams("synthetic", 1, seq_len=3000), saved(run))
    assert steps(resumed, 1) == one[2:]
    assert {*range(256)} <= {token for sample in one[0] for token in sample} <= {*range(258)}


def test_default_recipe_reads_python():
    held_out = DataConfig(dataset="python_stdlib_validation")
    with registries.having(registries.SHIPPED):
        training, validation = (
            one_epoch(open_source(config, load_tokenizer(None), seed=0))
            for config in (DataConfig(), held_out)
        )
    assert len(training) > 10 * len(validation) > 100
    assert not training & validation
    assert any("class JSONEncoder" in text for text in training | validation)
    assert not any("class TestJSONEncoder" in text for text in training | validation)


def test_tests_read_a_text_that_is_the_same_for_every_python():
    configs = (DataConfig(), DataConfig(dataset="python_stdlib_validation"))
    sources = [open_source(config, load_tokenizer(None), seed=0) for config in configs]
    digests = [digest(one_epoch(source)) for source in sources]
    assert digests == ["ebd778890deb64f7", "05554c2c69306a58"]


def digest(texts):
    return hashlib.sha256("".join(sorted(texts)).encode()).hexdigest()[:16]


def one_epoch(source):
    contents = set()
    for document in source.read({0: None}, 1)[0]:
        if source.epoch(document.position):
            return contents
        contents.add(document.content)
    raise AssertionError


def test_preview_shows_the_first_row(texts):
    (stream,) = streams(texts, 1, shuffle=False, seq_len=400)
    tokenizer = load_tokenizer(None)
    batch = next(stream)
    assert preview(batch, tokenizer).startswith("'<|begin_of_text|>0:aaa")
    assert preview(batch, tokenizer, chars=20) == "'<|begin_of_text|>0:a'..."


def test_unigram_loss_is_the_entropy(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    tokenizer = load_tokenizer(None)
    source = open_source(DataConfig(dataset=str(tmp_path)), tokenizer, seed=0)
    # BOS, a, b and EOS are equally frequent.
    assert unigram_loss(source, tokenizer, max_tokens=4000) == pytest.approx(np.log(4))


@pytest.mark.parametrize("lanes", [8, 16])
def test_a_group_that_is_lost_leaves_its_lanes_and_finds_them_again(texts, lanes):
    def group(number):
        return streams(texts, 4, batch=8, groups=2, lanes=lanes)[2 * number : 2 * number + 2]

    here, away = group(0), group(1)
    served = {lane: [] for lane in range(lanes)}

    def step(number, *of):
        """A step of some of the groups, who tell each other where they stand."""
        for group, own in of:
            samples = [row for stream in own for row in rows(next(stream))]
            for place, sample in enumerate(samples):
                served[(8 * number + 4 * group + place) % lanes].append(sample)
        for rank in range(2):
            total = sum(own[rank].positions() for _, own in of)
            for _, own in of:
                own[rank].update_positions(total)

    for number in range(5):
        step(number, (0, here), (1, away))
    for number in range(5, 11):
        step(number, (0, here))
    states = [stream.state_dict() for stream in here]
    assert len(merge_states(states)["lanes"]) == lanes
    back = group(1)
    for stream, state in zip(back, states, strict=True):
        stream.load_peer_state(state)
    for number in range(11, 20):
        step(number, (0, here), (1, back))
    assert saved(here) == saved(back)

    # Each lane was read without a gap, as in a run that lost nobody.
    whole = streams(texts, 1, batch=8, lanes=lanes)
    undisturbed = [sample for samples in steps(whole, 20) for sample in samples]
    for lane, samples in served.items():
        assert samples == undisturbed[lane::lanes][: len(samples)]
    assert sum(map(len, served.values())) == 20 * 8 - 6 * 4


def test_a_step_can_be_unread(texts):
    (stream,) = streams(texts, 1, num_workers=2)
    next(stream)
    before = stream.state_dict()
    expected = [rows(next(stream)) for _ in range(2)]
    stream.load_peer_state(before)
    assert [rows(next(stream)) for _ in range(2)] == expected


def hash_of(samples, first=0):
    parts = (np.array(tokens, "<i4").tobytes() for tokens in samples)
    hashes = [xxhash.xxh3_64_intdigest(part, seed=n) for n, part in enumerate(parts, first)]
    return f"{sum(hashes) % 2**64:016x}"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_hash_is_that_of_tokenized_samples_too(tmp_path, ranks):
    shards = token_shards.write_shards(tmp_path / "shards", token_shards.drawn_documents(50))
    of = token_shards.token_streams(DataConfig(dataset=str(shards), num_workers=ranks - 1), ranks)
    samples = token_shards.rows(of, 6)
    state = saved(of)
    assert state["hash"] == hash_of(samples)
    resumed = resume(token_shards.token_streams(DataConfig(dataset=str(shards)), 2), state)
    assert saved(resumed)["hash"] == hash_of(samples)
    samples += token_shards.rows(resumed, 2)
    assert saved(resumed)["hash"] == hash_of(samples)
    for stream in (*of, *resumed):
        stream.close()


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(1, {}), (2, {"num_workers": 2}), (4, {}), (2, {"accumulation": 2}), (1, {"lanes": 8})],
    ids=str,
)
def test_the_hash_is_the_sum_over_samples_by_their_number(texts, ranks, settings):
    of = streams(texts, ranks, batch=4, **settings)
    read = steps(of, 3, settings.get("accumulation", 1))
    samples = [sample for step in read for sample in step]
    assert saved(of)["hash"] == hash_of(samples)
    assert hash_text(sum(stream.hash.term or 0 for stream in of)) == hash_of(samples)
    for stream in of:
        stream.close()


def test_a_resumed_run_continues_the_hash_on_other_ranks_and_lengths(texts):
    of = streams(texts, 2)
    before = [sample for step in steps(of, 2) for sample in step]
    state = saved(of)
    resumed = resume(streams(texts, 4, seq_len=24), state)
    after = [sample for step in steps(resumed, 2) for sample in step]
    one, other = int(hash_of(before), 16), int(hash_of(after, first=len(before)), 16)
    assert saved(resumed)["hash"] == hash_text(one + other)


def test_the_hash_is_unknown_after_a_checkpoint_without_it(texts):
    (stream,) = streams(texts, 1)
    steps([stream], 2)
    state = saved([stream])
    del state["hash"]
    stream.load_state_dict(state)
    steps([stream], 1)
    assert stream.hash.term is None
    assert saved([stream])["hash"] is None


def test_the_hash_starts_over_where_the_stream_does(texts):
    (stream,) = streams(texts, 1)
    steps([stream], 2)
    stream.rewind()
    read = steps([stream], 1)[0]
    assert saved([stream])["hash"] == hash_of(read)
    stream.skip(8)
    read = steps([stream], 1)[0]
    assert saved([stream])["hash"] == hash_of(read, first=8)


def test_copies_of_a_data_rank_count_once():
    first = {"before": hash_text(5), "ranks": {"0": 2**63}}
    other = {"before": hash_text(5), "ranks": {"1": 2**63 + 1}}
    assert merged_hash([first, first, other, other]) == hash_text(6)
