"""Best-fit rows read from shards: contents, masks, epochs, and resumes at any sequence length."""

import itertools
from collections import Counter

import numpy as np
import pytest

from torchtitan.config import ConfigError
from torchtitan.data.lanes import ENDED
from torchtitan.data.tokens import sample_reader as reader_module
from torchtitan.data.tokens.index import ShardWriter, TokenDocuments, write_index
from torchtitan.data.tokens.sample_reader import RowReader, SourcePosition, TokenReader


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


def rows_of(documents, seq_len, epochs=None):
    given = {"seed": 1, "shuffle": True, "epochs": epochs}
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
    padded = RowReader(
        "a", documents, seq_len=20, seed=1, shuffle=True, epochs=1, is_padded=True
    ).cursor(SourcePosition())
    assert (padded.sample(rows_of_epoch(reader)).documents == ENDED).all()


def test_joined_samples_count_the_tokens_that_do_not_see_their_start(documents):
    reader = TokenReader("a", documents, seq_len=9, seed=1, shuffle=True, epochs=None)
    starts = set(np.cumsum([0, *documents.lengths(np.arange(100))]).tolist())
    cursor = reader.cursor(SourcePosition())
    for sample in map(cursor.sample, range(100)):
        is_start = [int(token) in starts for token in sample.tokens]
        assert sample.cut == (is_start.index(True) if any(is_start[:-1]) else 9)
