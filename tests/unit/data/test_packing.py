"""Best-fit packing: rows of a block, a reader of shards, and the stream; unknown token ids."""

import itertools
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.token_shards import (
    drawn_documents,
    resume,
    rows,
    saved,
    stream_of,
    token_streams,
    write_shards,
)
from torchtitan.config import ConfigError
from torchtitan.data.lanes import ENDED
from torchtitan.data.order import Document, Position
from torchtitan.data.settings import DataConfig
from torchtitan.data.stream import refuse_other
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.data.tokens import sample_reader as reader_module
from torchtitan.data.tokens.index import ShardWriter, TokenDocuments, write_index
from torchtitan.data.tokens.sample_reader import RowReader, SourcePosition, TokenReader, pack_block
from torchtitan.device import Device
from torchtitan.losses import IGNORED
from torchtitan.models.llama3 import Llama3Config
from torchtitan.tasks import next_token
from torchtitan.tasks.next_token import NextToken, TokenBatch

BEST_FIT = {"packing": "best_fit", "num_workers": 0}


DOCUMENTS = [
    np.arange(7 * number, 7 * number + len(document)) % 258
    for number, document in enumerate(drawn_documents(100))
]


def config_of(folder):
    return DataConfig(dataset=str(write_shards(folder / "own", DOCUMENTS)), **BEST_FIT)


def pairs(batch):
    """Count the targets that follow, in a document, the token they are predicted from."""
    found = zip(batch.tokens.flatten().tolist(), batch.targets.flatten().tolist(), strict=True)
    return Counter(pair for pair in found if pair[1] == (pair[0] + 1) % 258)


def test_padding_and_tokens_that_another_row_predicts_are_no_targets(tmp_path):
    """The block has 3 documents, of 3, 5 and 11 tokens; rows are 8 tokens long."""
    folder = write_shards(tmp_path / "own", np.split(np.arange(19), [3, 8]), shards=1)
    config = DataConfig(dataset=str(folder), shuffle=False, **BEST_FIT)
    [stream] = token_streams(config, 1, seq_len=7, batch=3)
    batch = next(stream)
    # The rest of the third document starts with token 15, which the row before it predicts.
    full = [[*range(7)], [*range(8, 15)]]
    assert batch.tokens.tolist() == [*full, [15, 16, 17, 18, 0, 0, 0]]
    assert batch.targets.tolist() == [
        *([token + 1 for token in row] for row in full),
        [16, 17, 18, *[IGNORED] * 4],
    ]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 1, 1], [0] * 7, [0, 0, 0, 0, -1, -1, -1]]
    assert stream.take_shares() == {"data_padding_pct": (3, 21), "data_cut_pct": (4, 18)}
    assert stream.take_shares() == {}


def test_padding_is_cut_into_short_documents(tmp_path, monkeypatch):
    """One document as long as all padding would cost attention as such a document does."""
    monkeypatch.setattr(next_token, "PADDING", 2)
    folder = write_shards(tmp_path / "own", [np.arange(4)], shards=1)
    config = DataConfig(dataset=str(folder), shuffle=False, **BEST_FIT)
    [stream] = token_streams(config, 1, seq_len=10, batch=1)
    batch = next(stream)
    assert batch.documents.tolist() == [[0, 0, 0, 0, -3, -3, -4, -4, -5, -5]]


def test_documents_stay_on_the_host():
    """Their boundaries are read there; all the rest moves."""
    documents = torch.zeros(1, 4, dtype=torch.int64)
    batch = TokenBatch(*(torch.ones(1, 4, dtype=torch.int64) for _ in range(3)), documents)
    moved = batch.to("meta")
    assert moved.tokens.is_meta
    assert moved.targets.is_meta
    assert moved.positions.is_meta
    assert moved.documents is documents

    class Pinning(Device):
        def pin(self, tensor):
            return tensor.to("meta")

    assert batch.pin(Pinning("cpu")).documents is documents


def test_a_rest_that_follows_another_document_is_not_predicted_from_it(tmp_path):
    """The rest of the second document, tokens 8 to 10, is in the row of the first."""
    folder = write_shards(tmp_path / "own", np.split(np.arange(11), [3]), shards=1)
    config = DataConfig(dataset=str(folder), shuffle=False, **BEST_FIT)
    [stream] = token_streams(config, 1, seq_len=5, batch=2)
    batch = next(stream)
    assert batch.tokens.tolist() == [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]
    assert batch.targets.tolist() == [[1, 2, IGNORED, 9, 10], [4, 5, 6, 7, 8]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 4])
def test_rows_do_not_depend_on_ranks_and_workers(tmp_path, ranks, workers):
    config = config_of(tmp_path)
    [whole] = token_streams(config, 1)
    config = config.model_copy(update={"num_workers": workers})
    parts = token_streams(config, ranks)
    for _ in range(8):
        expected = next(whole)
        found = [next(part) for part in parts]
        assert expected.inputs.tolist() == [row for part in found for row in part.inputs.tolist()]
    shares = [part.take_shares() for part in parts]
    assert {
        name: tuple(map(sum, zip(*(share[name] for share in shares), strict=True)))
        for name in shares[0]
    } == whole.take_shares()


@pytest.mark.parametrize("seq_lens", [(16, 16), (16, 40), (16, 9, 30)])
def test_a_run_with_other_sequence_lengths_predicts_every_token_once(tmp_path, seq_lens):
    """The state is that of a checkpoint, and the steps end inside of the only block."""
    config = config_of(tmp_path)
    found, state = Counter(), None
    for number, seq_len in enumerate(seq_lens):
        [stream] = token_streams(config, 1, seq_len=seq_len, batch=1)
        if state:
            stream.load_state_dict(state)
        is_last = number == len(seq_lens) - 1
        while saved([stream])["sources"][0]["position"][0] == 0:
            found += pairs(next(stream))
            if not is_last and stream.samples % 20 == 0:
                break
        state = saved([stream])
    assert found == Counter(
        (int(a), int(b)) for document in DOCUMENTS for a, b in itertools.pairwise(document)
    )


def test_joined_rows_do_not_resume_a_packed_run(tmp_path):
    config = config_of(tmp_path)
    [packed] = token_streams(config, 1)
    next(packed)
    [joined] = token_streams(config.model_copy(update={"packing": "join"}), 1)
    with pytest.raises(ConfigError, match="packing was 'best_fit' and is 'join'"):
        joined.load_state_dict(saved([packed]))


def test_a_source_that_is_read_in_part_has_enough_rows(tmp_path):
    """An epoch has at least as many rows as the run counts, for any sequence length."""
    config = config_of(tmp_path)
    source = {"path": config.dataset, "weight": 1}
    config = DataConfig.model_validate({"sources": [source], **BEST_FIT})
    tokens = sum(map(len, DOCUMENTS))
    steps = tokens // 17 // 4
    [stream] = token_streams(config, 1, steps=steps)
    for _ in range(steps):
        next(stream)
    [stream] = token_streams(config, 1, steps=steps)
    for _ in range(steps // 2):
        next(stream)
    left = (tokens - steps // 2 * 4 * 17) // 6 // 4
    fresh = token_streams(config, 1, seq_len=5, steps=steps // 2 + left)
    [shorter] = resume(fresh, saved([stream]))
    for _ in range(left):
        next(shorter)
    [shorter] = token_streams(config, 1, seq_len=5, steps=steps // 2 + left + 1)
    with pytest.raises(ConfigError, match="set repeat = true"):
        shorter.load_state_dict(saved([stream]))


def test_text_files_are_not_packed_while_training(tmp_path):
    (tmp_path / "text.txt").write_text("a document\n")
    config = DataConfig(dataset=str(tmp_path / "text.txt"), packing="best_fit")
    task = NextToken(Llama3Config(), type("Args", (), {"vocab_size": 258}))
    part = {"local_batch_size": 1, "accumulation": 1, "rank": 0, "ranks": 1}
    with pytest.raises(ConfigError, match="tokenize it first"):
        task.open_stream(config, seed=0, seq_len=8, **part)


def test_the_unigram_baseline_ends_with_the_documents_and_counts_no_padding(tmp_path):
    """They are fewer than the tokens that it takes from a larger source."""
    config = config_of(tmp_path).model_copy(update={"report_unigram_loss": True})
    task = NextToken(Llama3Config(), type("Args", (), {"vocab_size": 258}))
    words = task.reference(config, 0, lambda: token_streams(config, 1, seq_len=59, once=True)[0])
    # The first document of a row starts without a target.
    [stream] = token_streams(config, 1, seq_len=59, once=True)
    targets = np.concatenate([next(stream).targets.flatten() for _ in range(15)])
    shares = np.bincount(targets[targets != IGNORED]) / np.sum(targets != IGNORED)
    loss = -sum(share * np.log(share) for share in shares if share)
    assert words == f"a unigram model of this text has loss {loss:.3f}"
    assert (next(stream).targets == IGNORED).all()


def test_validation_joins_its_text():
    assert DataConfig(packing="best_fit").held_out().packing == "join"


class Arrays:
    """Source of documents that are tokens."""

    def __init__(self, *contents):
        self.identity = {}
        self._contents = contents

    def epoch(self, position):
        return position.round

    def read(self, starts, lanes):
        endless = itertools.cycle(enumerate(self._contents))
        documents = (Document(Position(0, n), np.array(each)) for n, each in endless)
        return dict.fromkeys(starts, documents)


def arrays_stream(*contents, workers=0, device=None):
    part = {"local_batch_size": 1, "accumulation": 1, "rank": 0, "ranks": 1, "device": device}
    config = DataConfig(num_workers=workers)
    return stream_of(config, Arrays(*contents), ByteTokenizer(), seq_len=8, **part)


@pytest.mark.parametrize("token", [258, -1, 2**32 + 5])
def test_a_token_outside_of_the_vocabulary_is_found_before_the_model_sees_it(token):
    stream = arrays_stream([1, 2, 3], [4, 257, token, 5])
    with pytest.raises(
        ConfigError, match=rf"document 1 of round 0 has the token {token} at 2, .* of 258"
    ):
        next(stream)


def test_shares_of_joined_text():
    """Documents are 6 tokens with BOS and EOS, and samples have 8 inputs.

    They start at tokens 0, 8, 16, 24: the second at the third token of a document, so 4 of its
    inputs do not see where that starts, and so on.
    """
    stream = arrays_stream([1, 2, 3, 4])
    for cut in (0, 4, 2, 0):
        next(stream)
        assert stream.take_shares() == {"data_cut_pct": (cut, 8)}


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_pinned_by_the_thread_that_collates_them(workers):
    threads = {}

    class Pinning(Device):
        def pin(self, tensor):
            threads[tensor.data_ptr()] = threading.get_ident()
            return tensor

    stream = arrays_stream([1, 2, 3, 4], workers=workers, device=Pinning("cpu"))
    batch = next(stream)
    stream.close()
    pinned = {threads[tensor.data_ptr()] for tensor in (batch.tokens, batch.targets)}
    assert len(pinned) == 1
    assert (pinned == {threading.get_ident()}) == (workers == 0)


@pytest.mark.parametrize(("ranks", "batch"), [(4, 4), (2, 6)])
def test_a_packed_mixture_resumes_exactly_on_other_ranks(tmp_path, ranks, batch):
    folders = [write_shards(tmp_path / n, drawn_documents(40, s)) for s, n in enumerate("ab")]
    sources = [{"path": str(folder), "weight": 1} for folder in folders]
    stages = [{"from_step": 5, "weights": [1, 3]}]
    repeating = [source | {"repeat": True} for source in sources]
    config = DataConfig.model_validate({"sources": repeating, "stages": stages, **BEST_FIT})
    whole = rows(token_streams(config, 1), 30)
    for steps in (4, 5, 13):
        before = token_streams(config, 2)
        assert rows(before, steps) == whole[: 4 * steps]
        state = saved(before)
        # A stage that has started is where it was, whatever the batch.
        after = resume(token_streams(config, ranks, batch=batch if steps > 5 else 4), state)
        count = 6 if steps > 5 else 8
        found = rows(after, count)
        assert found == whole[4 * steps : 4 * steps + len(found)]


def test_a_run_does_not_resume_where_documents_end_otherwise():
    """The file of a tokenizer stays the same if another token is declared."""
    now = {"tokenizer": "huggingface:1", "bos": None, "eos": 270}
    refuse_other(now, now)
    refuse_other({"tokenizer": "huggingface:1"}, now)  # a checkpoint of before they were recorded
    with pytest.raises(ConfigError, match="different data: eos was 272 and is 270"):
        refuse_other({**now, "eos": 272}, now)


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """100 documents of up to 30 tokens in blocks of 16; every token is another number."""
    monkeypatch.setattr(reader_module, "BLOCK", 16)
    lengths = np.random.default_rng(0).integers(0, 30, 100).tolist()
    writer = ShardWriter(tmp_path / "a.tokens", "uint16")
    for first, length in zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False):
        writer.add(range(first, first + length))
    write_index(tmp_path, "torchtitan", [writer.close()])
    return TokenDocuments(tmp_path, tmp_path, vocab_size=2**16)


def rows_of(documents, seq_len, epochs=None, **given):
    given |= {"seed": 1, "shuffle": True, "epochs": epochs}
    return RowReader("a", documents, seq_len=seq_len, **given)


def rows_of_epoch(reader):
    return sum(len(reader.rows(block, ())) for block in range(reader.blocks))


def trained(samples):
    """Count the targets of samples with the token before each, if that is of their document."""
    found = Counter()
    for sample in samples:
        for place in range(1, len(sample.tokens)):
            before, after = sample.documents[place - 1 : place + 1]
            if before == after != ENDED:
                found[int(sample.tokens[place - 1]), int(sample.tokens[place])] += 1
    return found


def pairs_of(documents):
    contents = [documents.read(i).tolist() for i in range(len(documents))]
    return Counter(pair for content in contents for pair in itertools.pairwise(content))


def test_every_token_is_predicted_once_an_epoch(documents):
    reader = rows_of(documents, 20)
    count = rows_of_epoch(reader)
    cursor = reader.cursor(SourcePosition())
    assert trained([cursor.sample(i) for i in range(count)]) == pairs_of(documents)
    assert cursor.position(count) == SourcePosition(1)


def test_documents_that_fit_are_whole_and_padding_follows(documents):
    reader = rows_of(documents, 29)
    cursor = reader.cursor(SourcePosition())
    samples = [cursor.sample(i) for i in range(rows_of_epoch(reader))]
    assert not any(sample.cut or sample.repeated for sample in samples)
    for sample in samples:
        tokens = int((sample.documents != ENDED).sum())
        assert (sample.documents[tokens:] == ENDED).all()
        numbers = sample.documents[:tokens]
        assert numbers[0] == 0
        assert set(np.diff(numbers)) <= {0, 1}


def test_cut_tokens_and_repeated_ones_are_known(documents):
    reader = rows_of(documents, 9)
    cursor = reader.cursor(SourcePosition())
    starts = set(np.cumsum([0, *documents.lengths(np.arange(100))]).tolist())
    for sample in (cursor.sample(i) for i in range(rows_of_epoch(reader))):
        firsts = np.flatnonzero(np.diff(sample.documents, prepend=-2))
        firsts = [i for i in firsts.tolist() if sample.documents[i] != ENDED]
        assert sample.repeated == tuple(i for i in firsts if int(sample.tokens[i]) not in starts)
        continued = [sample.documents[i] for i in sample.repeated]
        assert sample.cut == np.isin(sample.documents[:-1], continued).sum()


@pytest.mark.parametrize("lengths", [(20, 7, 12), (7, 20, 7), (12, 12, 12), (5, 29, 100)])
@pytest.mark.parametrize("counts", [(3, 4), (40, 1), (1, 0)])
def test_a_resume_with_another_sequence_length_is_exact(documents, lengths, counts):
    """The state is what a checkpoint holds: plain lists of integers."""
    position, samples = SourcePosition(), []
    for seq_len, count in zip(lengths, counts, strict=False):
        cursor = rows_of(documents, seq_len).cursor(position)
        samples += [cursor.sample(i) for i in range(count)]
        saved = [list(each) if isinstance(each, tuple) else each for each in cursor.position(count)]
        position = SourcePosition(*saved)
    cursor = rows_of(documents, lengths[-1]).cursor(position)
    number = 0
    while cursor.position(number).epoch == 0:
        samples.append(cursor.sample(number))
        number += 1
    assert cursor.position(number) == SourcePosition(1)
    assert trained(samples) == pairs_of(documents)


def test_a_resume_with_the_same_length_continues_with_the_next_row(documents):
    whole = rows_of(documents, 12).cursor(SourcePosition())
    for count in (0, 1, 30, 61):
        resumed = rows_of(documents, 12).cursor(whole.position(count))
        for number in range(5):
            assert resumed.position(number) == whole.position(count + number)
            a, b = resumed.sample(number), whole.sample(count + number)
            assert (a.tokens == b.tokens).all()
            assert (a.documents == b.documents).all()


def test_documents_are_counted_once_begun(documents):
    empty = int((documents.lengths(np.arange(100)) == 0).sum())
    cursor = rows_of(documents, 9).cursor(SourcePosition())
    reader, begun, number = cursor.reader, set(), 0
    while cursor.position(number).epoch == 0:
        count = reader.documents_before(cursor.position(number))
        assert len(begun) <= count <= len(begun) + empty
        block, row = cursor.locate(number)
        begun |= {(block, document) for document, _, _ in reader.rows(block, ())[row]}
        number += 1
    assert len(begun) + empty == 100
    assert reader.documents_before(SourcePosition(1)) >= 100


def test_a_source_that_has_ended_is_refused_or_padded(documents):
    reader = rows_of(documents, 20, epochs=1)
    with pytest.raises(ConfigError, match='"a" has ended'):
        reader.cursor(SourcePosition()).sample(rows_of_epoch(reader))
    padded = rows_of(documents, 20, epochs=1, is_padded=True).cursor(SourcePosition())
    assert (padded.sample(rows_of_epoch(reader)).documents == ENDED).all()


def test_joined_samples_count_the_tokens_that_do_not_see_their_start(documents):
    reader = TokenReader("a", documents, seq_len=9, seed=1, shuffle=True, epochs=None)
    starts = set(np.cumsum([0, *documents.lengths(np.arange(100))]).tolist())
    for sample in map(reader.cursor(SourcePosition()).sample, range(100)):
        is_start = [int(token) in starts for token in sample.tokens]
        assert sample.cut == (is_start.index(True) if any(is_start[:-1]) else 9)


lengths = st.lists(st.integers(0, 40), max_size=60)
tries = settings(max_examples=150)


def packed(documents, seq_len, consumed=()):
    return pack_block(np.array(documents, np.int64), seq_len, consumed)


def spans(rows, first=0, end=None):
    """Document, first token and token after the last of each piece, by row."""
    return [
        [(document, start, start + count) for document, start, count in rows[row]]
        for row in range(len(rows))[first:end]
    ]


def tokens_and_pairs(rows):
    """Count how often each token, and each pair of a token and the next one, is in a row."""
    pieces = [piece for row in rows for piece in row]
    tokens = Counter((document, t) for document, start, end in pieces for t in range(start, end))
    pairs = Counter((document, t) for document, start, end in pieces for t in range(start + 1, end))
    return tokens, pairs


def rows_by(fit, counts, room):
    """The rows of the first or the best fit, the longest first: the definition, step by step."""
    free = []
    for count in sorted(counts, reverse=True):
        rows = [i for i, space in enumerate(free) if space >= count]
        if rows:
            free[rows[0] if fit == "first" else min(rows, key=free.__getitem__)] -= count
        else:
            free.append(room - count)
    return len(free)


@tries
@given(lengths, st.integers(1, 30))
def test_each_token_is_predicted_in_one_row(documents, seq_len):
    tokens, pairs = tokens_and_pairs(spans(packed(documents, seq_len)))
    assert set(tokens) == {(d, t) for d, n in enumerate(documents) for t in range(n)}
    assert pairs == Counter((d, t) for d, n in enumerate(documents) for t in range(1, n))
    # A token is in two rows only where a document that is longer than a row is divided.
    assert all(documents[d] > seq_len + 1 for (d, _), times in tokens.items() if times > 1)


@tries
@given(lengths, st.integers(1, 30))
def test_rows_are_full_or_less_and_short_documents_whole(documents, seq_len):
    rows = spans(packed(documents, seq_len))
    assert all(row == sorted(row) for row in rows)
    assert all(0 < sum(end - start for _, start, end in row) <= seq_len + 1 for row in rows)
    whole = {piece for row in rows for piece in row}
    assert all((d, 0, n) in whole for d, n in enumerate(documents) if 0 < n <= seq_len + 1)
    # Pieces of a divided document but its last fill rows of their own, so only documents that
    # have ended are before another in a row.
    assert all(len(row) == 1 for row in rows for d, _, end in row if end < documents[d])


@tries
@given(lengths, st.integers(1, 30))
def test_rows_are_those_of_best_fit_decreasing(documents, seq_len):
    rows = packed(documents, seq_len)
    assert len(rows) == rows_by("best", rows.pieces.counts.tolist(), seq_len + 1)


@tries
@given(st.data())
def test_there_is_no_more_padding_than_with_first_fit(data):
    """This is a theorem if no piece is under a sixth of a row; otherwise either can be better."""
    room = data.draw(st.integers(2, 200))
    documents = data.draw(st.lists(st.integers(-(-room // 6), room), max_size=80))
    assert len(packed(documents, room - 1)) <= rows_by("first", documents, room)


@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_documents_of_real_lengths_leave_little_padding(seq_len):
    documents = np.random.default_rng(0).lognormal(6, 1.2, 8192).astype(np.int64) + 1
    rows = packed(documents.tolist(), seq_len)
    counts = rows.pieces.counts
    assert len(rows) <= rows_by("first", counts.tolist(), seq_len + 1)
    assert counts.sum() > 0.998 * len(rows) * (seq_len + 1)
    # Long documents are not earlier in a block than short ones.
    longest = np.array([rows[row].counts.max() for row in range(len(rows))])
    assert abs(np.corrcoef(longest, np.arange(len(rows)))[0, 1]) < 0.1


@tries
@given(st.data(), lengths)
def test_another_sequence_length_repeats_and_skips_nothing(data, documents):
    consumed = []
    served = []
    for _ in range(3):
        seq_len = data.draw(st.integers(1, 30))
        rows = packed(documents, seq_len, consumed)
        assert all(sum(e - s for _, s, e in row) <= seq_len + 1 for row in spans(rows))
        count = data.draw(st.integers(0, len(rows)))
        served += spans(rows, end=count)
        consumed.append((seq_len, count))
    last = data.draw(st.integers(1, 30))
    served += spans(packed(documents, last, consumed))
    tokens, pairs = tokens_and_pairs(served)
    assert set(tokens) == {(d, t) for d, n in enumerate(documents) for t in range(n)}
    assert pairs == Counter((d, t) for d, n in enumerate(documents) for t in range(1, n))


def test_what_is_left_of_a_document_is_one_piece_for_a_longer_sequence():
    assert spans(packed([9], 2)) == [[(0, 0, 3)], [(0, 2, 5)], [(0, 4, 7)], [(0, 6, 9)]]
    assert spans(packed([9], 8, [(2, 1)])) == [[(0, 2, 9)]]


def test_rows_of_an_example():
    """Two rows of 8 tokens are full; the third document is divided."""
    found = spans(packed([3, 5, 11, 4], 7))
    assert found == [[(0, 0, 3), (1, 0, 5)], [(2, 0, 8)], [(2, 7, 11), (3, 0, 4)]]
