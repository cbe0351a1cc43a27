"""Best-fit packing: nothing is lost or repeated, and documents that fit stay whole."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.data.tokens.sample_reader import pack_block

Length = tuple[int, int]
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


def first_fit_decreasing(counts, room):
    free = []
    for count in sorted(counts, reverse=True):
        row = next((i for i, space in enumerate(free) if space >= count), None)
        if row is None:
            free.append(room - count)
        else:
            free[row] -= count
    return len(free)


def best_fit_decreasing(counts, room):
    """The definition, step by step."""
    free = []
    for count in sorted(counts, reverse=True):
        row = min(
            (i for i, space in enumerate(free) if space >= count),
            key=free.__getitem__,
            default=None,
        )
        if row is None:
            free.append(room - count)
        else:
            free[row] -= count
    return len(free)


@tries
@given(lengths, st.integers(1, 30))
def test_each_token_is_predicted_in_one_row(documents, seq_len):
    rows = spans(packed(documents, seq_len))
    tokens, pairs = tokens_and_pairs(rows)
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
    assert len(rows) == best_fit_decreasing(rows.pieces.counts.tolist(), seq_len + 1)


@tries
@given(st.data())
def test_there_is_no_more_padding_than_with_first_fit(data):
    """This is a theorem if no piece is under a sixth of a row; otherwise either can be better."""
    room = data.draw(st.integers(2, 200))
    documents = data.draw(st.lists(st.integers(-(-room // 6), room), max_size=80))
    assert len(packed(documents, room - 1)) <= first_fit_decreasing(documents, room)


@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_documents_of_real_lengths_leave_little_padding(seq_len):
    draw = np.random.default_rng(0)
    documents = draw.lognormal(6, 1.2, 8192).astype(np.int64) + 1
    rows = packed(documents.tolist(), seq_len)
    counts = rows.pieces.counts
    assert len(rows) <= first_fit_decreasing(counts.tolist(), seq_len + 1)
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
    assert spans(packed([3, 5, 11, 4], 7)) == [
        [(0, 0, 3), (1, 0, 5)],
        [(2, 0, 8)],
        [(2, 7, 11), (3, 0, 4)],
    ]
