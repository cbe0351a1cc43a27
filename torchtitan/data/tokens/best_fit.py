"""Best-fit packing of the documents of one block: rows of seq_len + 1 tokens that keep them whole.

The longest document that is left goes to the fullest row that has room for it, or to an empty
row (best-fit decreasing; Ding et al., "Fewer Truncations Improve Language Modeling",
arXiv:2404.10830). The end of a row that nothing fits is padding.

A document is in one *piece* if it fits in a row. A longer one is divided into pieces of a row each;
the rest is packed like a document. Each piece starts with the last token of the piece before it, so
that the pairs of a token and the next, which are what is trained on, are all in exactly one row:

    tokens of a document      0 1 2 3 4 5 6 7 8
    pieces for seq_len = 4    0 1 2 3 4
                                      4 5 6 7 8

The rows of a block are in the order of their longest pieces in the block, so if documents are
shuffled, so are rows, whatever their lengths. All results are functions of the lengths alone.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.data.tokens.index import Numbers

Consumed = Sequence[Sequence[int]]
"""Sequence lengths that a block was packed with, and the number of rows consumed of each before the
length changed."""


@dataclass(frozen=True)
class Pieces:
    """Parts of the documents of a block."""

    documents: Numbers
    """Document of each, by its place in the block."""
    firsts: Numbers
    """First token of each in its document."""
    counts: Numbers
    """Tokens of each."""

    def __len__(self) -> int:
        return len(self.documents)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.documents.tolist(), self.firsts.tolist(), self.counts.tolist(), strict=True)

    def __getitem__(self, which: slice | Numbers) -> "Pieces":
        return Pieces(self.documents[which], self.firsts[which], self.counts[which])


@dataclass(frozen=True)
class Rows:
    """Packed rows of a block."""

    pieces: Pieces
    """Pieces of all rows, one row after the other; in a row they are in the order of the block."""
    ends: Numbers
    """Number of pieces in the rows up to and including each."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> Pieces:
        return self.pieces[slice(self.ends[row - 1] if row else 0, self.ends[row])]


def pack_block(lengths: Numbers, seq_len: int, consumed: Consumed = ()) -> Rows:
    """Pack what is left of a block after `consumed`; `lengths` are the tokens of each document."""
    return _pack(pieces_left(lengths, consumed), seq_len)


def pieces_left(lengths: Numbers, consumed: Consumed) -> Pieces:
    """Return what is left of a block, in pieces as long as possible; empty documents have none."""
    documents = np.flatnonzero(lengths)
    left = Pieces(documents, np.zeros_like(documents), lengths[documents].astype(np.int64))
    for seq_len, rows in consumed:
        left = _left(_pack(left, seq_len), rows)
    return left


def _left(rows: Rows, consumed: int) -> Pieces:
    """Return the pieces of all rows but the first `consumed`; those of a document are joined."""
    left = rows.pieces[slice(rows.ends[consumed - 1] if consumed else 0, None)]
    left = left[np.lexsort((left.firsts, left.documents))]
    ends = left.firsts + left.counts
    continues = left.documents[1:] == left.documents[:-1]
    continues &= left.firsts[1:] == ends[:-1] - 1
    starts = np.flatnonzero(np.append(True, ~continues)[: len(left)])
    last = np.append(starts[1:], len(left))[: len(starts)] - 1
    firsts = left.firsts[starts]
    return Pieces(left.documents[starts], firsts, ends[last] - firsts)


def _pack(whole: Pieces, seq_len: int) -> Rows:
    pieces = _divided(whole, seq_len)
    order = np.argsort(-pieces.counts, kind="stable")
    rows = np.empty(len(pieces), np.int64)
    rows[order] = _best_fit(pieces.counts[order], seq_len + 1)
    # Rows are numbered as they are opened, so the longest piece of each is the first in `order`.
    _, longest = np.unique(rows[order], return_index=True)
    rank = np.empty(len(longest), np.int64)
    rank[np.argsort(order[longest])] = np.arange(len(longest))
    rows = rank[rows]
    ends = np.cumsum(np.bincount(rows, minlength=len(longest)))
    return Rows(pieces[np.argsort(rows, kind="stable")], ends)


def _divided(whole: Pieces, seq_len: int) -> Pieces:
    """Divide what does not fit in a row; pieces are in the order of their documents."""
    parts = np.maximum(1, -(-(whole.counts - 1) // seq_len))
    source = np.repeat(np.arange(len(whole)), parts)
    offsets = (np.arange(len(source)) - np.repeat(np.cumsum(parts) - parts, parts)) * seq_len
    counts = np.minimum(whole.counts[source] - offsets, seq_len + 1)
    return Pieces(whole.documents[source], whole.firsts[source] + offsets, counts)


def _best_fit(counts: Numbers, room: int) -> Numbers:
    """Return the row of each piece; `counts` are descending, and none is over `room`.

    Pieces of one length are handled together: the row that is best for the first is best for the
    next as long as it has room.
    """
    found, repeats = np.unique(-counts, return_counts=True)
    shortest = -int(found[-1]) if len(found) else 0
    opened = 0
    base = len(counts)
    free: list[int] = []  # room * base + row, ascending
    rows: list[int] = []
    taken: list[int] = []
    for count, repeat in zip((-found).tolist(), repeats.tolist(), strict=True):
        left = repeat
        while left:
            best = bisect_left(free, count * base)
            if best < len(free):
                space, row = divmod(free.pop(best), base)
            else:
                space, row = room, opened
                opened += 1
            take = min(left, space // count)
            rows.append(row)
            taken.append(take)
            left -= take
            space -= take * count
            if space >= shortest:
                insort(free, space * base + row)
    return np.repeat(np.array(rows, np.int64), taken)
