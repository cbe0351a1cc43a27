"""The stream of tokenized sources: one order on any layout, mixtures, stages, exact resume."""

import itertools
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.token_shards import drawn_documents, resume, rows, saved, token_streams, write_shards
from torchtitan.config import ConfigError
from torchtitan.data.settings import DataConfig, SourceConfig, StageConfig
from torchtitan.data.tokens import mixed_sources
from torchtitan.data.tokens import sample_reader as reader
from torchtitan.tasks.next_token import NextToken


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(reader, "BLOCK", 16)
    monkeypatch.setattr(mixed_sources, "PART", 64)


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path / "web", drawn_documents(100))


def single(path, **values):
    return DataConfig(dataset=str(path), num_workers=0, **values)


def mixture(folder, *amounts, **values):
    """A mixture of as many sources as there are amounts."""
    sources = []
    for number, amount in enumerate(amounts):
        path = folder / f"source-{number}"
        if not path.exists():
            write_shards(path, drawn_documents(100 + 7 * number, seed=number))
        sources.append(SourceConfig(path=str(path), **amount))
    return DataConfig(sources=tuple(sources), num_workers=0, **values)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7).filter(any), st.integers(0, 300))
def test_a_mixture_is_exact_at_every_prefix(weights, before):
    whole, counts = mixed_sources.MixtureSchedule(weights), [0] * len(weights)
    for number in range(700):
        source, place = whole.turn(number)
        assert place == counts[source]
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - Fraction((number + 1) * weight, sum(weights))) < 1
        assert number % 4 != 3 or whole.counts(number + 1) == counts
    resumed = mixed_sources.MixtureSchedule(weights, before, whole.counts(before))
    for number in range(200):
        source, place = resumed.turn(number)
        assert (source, place + resumed.before_of[source]) == whole.turn(before + number)


def test_weights_are_as_written():
    assert mixed_sources.whole_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert mixed_sources.whole_weights([3, 0, 1.5]) == [2, 0, 1]
    assert mixed_sources.whole_weights([0.123457, 0.0001, 0.876443]) == [123457, 100, 876443]


def test_all_tokens_are_read_once_an_epoch(shards):
    documents = drawn_documents(100)
    total = sum(map(len, documents))
    [stream] = token_streams(single(shards), 1)
    taken = list(itertools.chain(*(row[:-1] for row in rows([stream], total // 32 + 1))))
    first, second = taken[:total], taken[total : 2 * total]
    in_order = np.concatenate(documents).tolist()
    assert sorted(first) == sorted(second) == sorted(in_order)
    assert first != in_order != second != first, "each epoch has an order of its own"
    [plain] = token_streams(single(shards, shuffle=False), 1)
    assert list(itertools.chain(*(row[:-1] for row in rows([plain], 5)))) == in_order[: 5 * 64]


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_samples_do_not_depend_on_ranks_and_workers(tmp_path, ranks, workers):
    config = mixture(tmp_path, {"weight": 3}, {"weight": 1}, {"weight": 1.5, "repeat": True})
    whole = rows(token_streams(config, 1), 12)
    config = config.model_copy(update={"num_workers": workers})
    assert rows(token_streams(config, ranks), 12) == whole


@pytest.mark.parametrize(("ranks", "batch"), [(1, 4), (4, 4), (2, 6), (1, 2)])
def test_a_resume_with_other_ranks_and_batches_is_exact(tmp_path, ranks, batch):
    """However often: each session ends inside a turn of the mixture, and starts another's."""
    stages = (StageConfig(from_tokens=16 * 4 * 9, weights=(1, 1, 4)),)
    amounts = [{"weight": w, "repeat": True} for w in (3, 1, 1.5)]
    config = mixture(tmp_path, *amounts, stages=stages)
    whole = rows(token_streams(config, 1), 18)
    session, begin = token_streams(config, 2), 0
    for end in (1, 3, 4, 9, 11):
        assert rows(session, end - begin) == whole[4 * begin : 4 * end]
        state, begin = saved(session), end
        after, session = token_streams(config, ranks, batch=batch), token_streams(config, 2)
        resume((*after, *session), state)
        count = (18 - end) * 4 // batch
        assert rows(after, count) == whole[4 * end : 4 * end + count * batch]
        assert saved(after)["samples"] == 4 * end + count * batch


def test_ranks_that_accumulate_share_the_samples_of_a_step(tmp_path):
    """As in a run on one rank, and also after a resume."""
    config = mixture(tmp_path, *[{"weight": w, "repeat": True} for w in (3, 1)])
    whole = rows(token_streams(config, 1, batch=8), 5)

    def step(streams):
        return [row for stream in streams for row in rows([stream], 2)]

    before = token_streams(config, 2, batch=8, accumulation=2)
    assert [row for _ in range(3) for row in step(before)] == whole[:24]
    after = resume(token_streams(config, 4, batch=8, accumulation=2), saved(before))
    assert [row for _ in range(2) for row in step(after)] == whole[24:]


def test_a_resume_with_another_sequence_length_continues_at_the_next_token(shards):
    config = single(shards)
    [whole] = token_streams(config, 1)
    tokens = list(itertools.chain(*(row[:-1] for row in rows([whole], 12))))
    [before] = token_streams(config, 1)
    rows([before], 5)
    [after] = resume(token_streams(config, 1, seq_len=24), saved([before]))
    assert list(itertools.chain(*(row[:-1] for row in rows([after], 4)))) == tokens[320:704]


def test_a_stage_changes_the_mixture(tmp_path):
    stages = (
        StageConfig(from_step=3, weights=(0, 1)),
        StageConfig(from_tokens=16 * 4 * 5 + 1, weights=(1, 0)),
    )
    config = mixture(tmp_path, {"weight": 1}, {"weight": 1}, stages=stages)
    [stream] = token_streams(config, 1)
    names = [stream.source(number) for number in range(28)]
    first, second = "source-0", "source-1"
    assert sorted(names[:12]) == [first] * 6 + [second] * 6
    # 321 tokens end in the 21st sample.
    assert names[12:] == [second] * 9 + [first] * 7


def test_numbers_of_tokens_and_epochs_are_reached(tmp_path):
    amounts = ({"tokens": 16 * 30}, {"epochs": 1.5}, {"weight": 1, "repeat": True})
    config = mixture(tmp_path, *amounts)
    [stream] = token_streams(config, 1, steps=100)
    rows([stream], 100)
    [first, second, third] = saved([stream])["sources"]
    epochs = int(1.5 * sum(map(len, drawn_documents(107, seed=1)))) - 1
    assert (first["samples"], second["samples"]) == (30, epochs // 16)
    assert first["samples"] + second["samples"] + third["samples"] == 400
    with pytest.raises(ConfigError, match=r"set training.steps = \d+"):
        token_streams(config, 1, steps=10)[0].check()


def test_a_source_that_would_end_is_refused_at_the_start(tmp_path):
    config = mixture(tmp_path, {"weight": 1}, {"weight": 1, "repeat": True})
    token_streams(config, 1, steps=80)[0].check()
    with pytest.raises(
        ConfigError, match=r'data\.sources\.0: "source-0" has 3,018 tokens, and the run takes 6,400'
    ):
        token_streams(config, 1, steps=200)[0].check()
    with pytest.raises(ConfigError, match='"source-0" has ended'):
        rows(token_streams(config, 1), 200)


@pytest.mark.parametrize("stage", [None, 3])
def test_a_run_is_refused_exactly_if_a_source_would_end(stage, tmp_path):
    sizes = {"a": 33, "b": 1000}
    paths = [write_shards(tmp_path / n, [np.arange(sizes[n]) % 200], 1) for n in sizes]
    stages = (StageConfig(from_step=stage, weights=(1, 2)),) if stage else ()
    for weights, batch, steps in itertools.product(
        ((1, 1), (1, 2), (2, 3), (3, 7)), (1, 2, 4), (3, 5)
    ):
        sources = [
            SourceConfig(path=str(path), weight=weight)
            for path, weight in zip(paths, weights, strict=True)
        ]
        config = DataConfig(sources=tuple(sources), stages=stages, num_workers=0)
        [checked] = token_streams(config, 1, batch=batch, steps=steps)
        [endless] = token_streams(config, 1, batch=batch)
        try:
            rows([endless], steps)
        except ConfigError:
            with pytest.raises(ConfigError, match='"a" has 33 tokens, and the run takes'):
                checked.check()
        else:
            checked.check()


def test_a_mixture_is_skipped_in_the_order_of_its_sources(tmp_path):
    amounts = [{"weight": w, "repeat": True} for w in (0.7, 0.3)]
    stages = (StageConfig(from_step=5, weights=(3, 1)),)
    config = mixture(tmp_path, *amounts, stages=stages)
    whole = rows(token_streams(config, 1), 8)
    for samples in (4, 12, 20, 24):
        [skipped] = token_streams(config, 1)
        skipped.skip(samples)
        assert rows([skipped], 2) == whole[samples : samples + 8]
    config = mixture(tmp_path, *amounts, stages=(StageConfig(from_tokens=5 * 64, weights=(3, 1)),))
    [skipped] = token_streams(config, 1)
    skipped.skip(24)
    assert rows([skipped], 2) == whole[24:32]
    [skipped] = token_streams(mixture(tmp_path, *amounts, stages=stages), 1)
    skipped.skip(24, 0)  # as a run whose first steps read what is behind them
    assert "from sample 44 on" in skipped.describe()


def test_a_run_of_an_earlier_version_continues_its_order(shards):
    [before] = token_streams(single(shards), 1)
    before.follow({"shuffle": True})
    expected = rows([before], 8)
    assert expected != rows(token_streams(single(shards), 1), 8)
    before.rewind()
    rows([before], 3)
    state = saved([before])
    assert "order" not in state["identity"]
    [after] = resume(token_streams(single(shards), 1), state)
    assert rows([after], 5) == expected[12:]
    assert "order" not in saved([after])["identity"]


def test_another_mixture_is_taken_only_from_a_stage_on(tmp_path):
    amounts = [{"weight": w, "repeat": True} for w in (1, 1)]
    before = token_streams(mixture(tmp_path, *amounts), 1)
    rows(before, 4)
    state = saved(before)
    other = mixture(tmp_path, *[{"weight": w, "repeat": True} for w in (3, 1)])
    message = "the mixture until step 4 was 50% source-0, 50% source-1, and the recipe has 75%"
    with pytest.raises(ConfigError, match=message):
        token_streams(other, 1)[0].load_state_dict(state)
    for start, is_taken in ((4, True), (7, True), (3, False)):
        stage = StageConfig(from_step=start, weights=(1, 0))
        [stream] = token_streams(mixture(tmp_path, *amounts, stages=(stage,)), 1)
        if not is_taken:
            with pytest.raises(ConfigError, match="from_step = 4"):
                stream.load_state_dict(state)
            continue
        stream.load_state_dict(state)
        names = [stream.source(number) for number in range(16, 36)]
        assert set(names[4 * (start - 4) :]) == {"source-0"}
        assert len(set(names[: 4 * (start - 4)])) == (2 if start > 4 else 0)


def test_a_changed_source_is_refused_unless_it_is_accepted(tmp_path):
    config = single(write_shards(tmp_path / "web", drawn_documents(100)))
    before = token_streams(config, 1)
    rows(before, 4)
    documents = drawn_documents(100)
    documents[3] = documents[3] ^ 1
    other = write_shards(tmp_path / "new" / "web", documents)
    changed = "it has changed since the checkpoint (its content was"
    with pytest.raises(ConfigError, match=re.escape(changed)):
        token_streams(single(other), 1)[0].load_state_dict(saved(before))
    [stream] = resume(token_streams(single(other, accept_changes=True), 1), saved(before))
    assert len(rows([stream], 1)) == 4


def test_reading_once_ends_with_padding(shards):
    total = sum(map(len, drawn_documents(100)))
    [stream] = token_streams(single(shards), 1, once=True)
    counts = [int(next(stream).count()) for _ in range(total // 64 + 2)]
    assert sum(counts) == total - 1
    assert counts[-1] == 0


def test_a_lost_replica_group_leaves_its_samples_and_finds_them_again(tmp_path):
    config = mixture(tmp_path, *[{"weight": w, "repeat": True} for w in (2, 1)])
    served = []

    def group(number):
        return token_streams(config, 4, batch=8, groups=2)[2 * number : 2 * number + 2]

    def step(*present):
        for streams in present:
            served.extend(rows(streams, 1))
        for rank in range(2):
            total = sum(streams[rank].positions() for streams in present)
            for streams in present:
                streams[rank].update_positions(total)

    here, away = group(0), group(1)
    for _ in range(3):
        step(here, away)
    for _ in range(2):
        step(here)
    back = group(1)
    for stream, state in zip(back, [stream.state_dict() for stream in here], strict=True):
        stream.load_peer_state(state)
    for _ in range(2):
        step(here, back)
    assert saved(here)["samples"] == saved(back)["samples"] == 5 * 8 + 2 * 4
    # A run without groups first reads what is left behind, then continues.
    [alone] = resume(token_streams(config, 1, batch=4), saved(here))
    assert (saved([alone])["pending"], saved([alone])["next"]) == (
        [number for step in (5, 6) for number in range(8 * step + 4, 8 * step + 8)],
        56,
    )
    served += rows([alone], 4)
    whole = rows(token_streams(config, 1, batch=8), 8)
    assert sorted(served) == sorted(whole)


def test_amounts_are_those_of_the_rest_of_a_resumed_run(tmp_path):
    config = mixture(tmp_path, {"tokens": 16 * 40}, {"weight": 1, "repeat": True})
    before = token_streams(config, 1, steps=20)
    rows(before, 12)
    taken = saved(before)["sources"][0]["tokens"]
    # At twice the length, the rest of the run has more tokens than a new run of 16 steps.
    [after] = resume(token_streams(config, 1, seq_len=32, steps=16), saved(before))
    rows([after], 4)
    [first, _] = saved([after])["sources"]
    assert taken < first["tokens"] <= 16 * 40
    assert 16 * 40 - first["tokens"] < 32


def test_a_source_of_less_than_a_sample_is_refused(tmp_path):
    config = mixture(tmp_path, {"tokens": 15}, {"weight": 1, "repeat": True})
    with pytest.raises(ConfigError, match='"source-0" has fewer tokens than a sample of 16'):
        token_streams(config, 1, steps=10)[0].check()


def test_a_mixture_is_described_with_its_stages(tmp_path):
    stages = (StageConfig(from_step=3, weights=(1, 3)),)
    config = mixture(tmp_path, {"weight": 1}, {"weight": 1}, stages=stages)
    [stream] = token_streams(config, 1)
    first, then = "50% source-0, 50% source-1", "25% source-0, 75% source-1"
    assert stream.describe() == f"{first}; from sample 12 on {then}"


def test_tokens_have_no_held_out_part(shards):
    for section in (single(shards, validation_fraction=0.1), DataConfig(packing="best_fit")):
        message = r"data\.validation_fraction: tokens have no held-out part|tokenize it first"
        with pytest.raises(ConfigError, match=message):
            NextToken.check_files(section)
    mixed_sources.check_text_or_tokens(single(shards, packing="best_fit"))


def test_text_is_tokenized_again_after_an_edit_that_keeps_its_size(tmp_path):
    def tokens(name, key=None):
        source = SourceConfig(path=str(tmp_path / name), weight=1, repeat=True, text_key=key)
        config = DataConfig(sources=(source,), cache=str(tmp_path / "cache"), num_workers=0)
        return {token for row in rows(token_streams(config, 1), 2) for token in row if token < 256}

    found = []
    for folder, text in (("one", "abc"), ("two", "xyz"), ("one", "ABC")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "text.txt").write_text(text)
        found.append(tokens(folder))
    assert found == [set(b"abc"), set(b"xyz"), set(b"ABC")]
    (tmp_path / "a.jsonl").write_text('{"text": "abc", "body": "xyz"}\n')
    assert [tokens("a.jsonl", k) for k in ("text", "body")] == [set(b"abc"), set(b"xyz")]
