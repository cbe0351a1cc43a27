"""Samples of one tokenized source, each computed from its position alone.

The documents of an epoch, in the order that the seed gives them, are divided into *blocks*. The
documents of a block are joined, and cut into samples of seq_len + 1 tokens; the last token of a
sample is the first of the next, so that every token is predicted once. A sample may reach into the
next block and the next epoch.
"""

import functools
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan.config import ConfigError
from torchtitan.data.lanes import ENDED, Sample
from torchtitan.data.order import ORDER, drawn_order
from torchtitan.data.tokens.index import Numbers, TokenDocuments

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


def _best_fit(counts: Numbers, row_size: int) -> Numbers:
    """Return the row of each piece; `counts` are descending, and none is over `row_size`.

    Pieces of one length are handled together: the row that is best for the first is best for the
    next as long as it has space.
    """
    found, repeats = np.unique(-counts, return_counts=True)
    shortest = -int(found[-1]) if len(found) else 0
    opened = 0
    base = len(counts)
    free: list[int] = []  # space * base + row, ascending
    rows: list[int] = []
    placed: list[int] = []
    for count, repeat in zip((-found).tolist(), repeats.tolist(), strict=True):
        left = repeat
        while left:
            best = bisect_left(free, count * base)
            if best < len(free):
                space, row = divmod(free.pop(best), base)
            else:
                space, row = row_size, opened
                opened += 1
            fitting = min(left, space // count)
            rows.append(row)
            placed.append(fitting)
            left -= fitting
            space -= fitting * count
            if space >= shortest:
                insort(free, space * base + row)
    return np.repeat(np.array(rows, np.int64), placed)


BLOCK = 8192
"""Documents in a block."""


class SourcePosition(NamedTuple):
    """Position in the sequence of all epochs of a source."""

    epoch: int = 0
    block: int = 0
    offset: int = 0
    """Number of tokens of the block before it; 0 with best-fit packing."""
    rows: Sequence[Sequence[int]] = ()
    """With best-fit packing: each sequence length that the block was packed with, and the number
    of its rows that were consumed."""

    def as_json(self) -> list[Any]:
        """Return the position as JSON has it."""
        return [*self[:3], [list(packed) for packed in self.rows]]


class Block(NamedTuple):
    """Consecutive documents of an epoch."""

    documents: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    """Number of tokens up to the end of each document."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the block."""
        return int(self.ends[-1])


class TokenReader:
    """Samples of a source by their position; may be used by several threads."""

    def __init__(
        self,
        name: str,
        documents: TokenDocuments,
        *,
        seq_len: int,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        is_padded: bool = False,
        order: int | str = ORDER,
    ) -> None:
        """
        Args:
            epochs: number of times that the source may be read; None: any.
            is_padded: whether padding follows the last epoch, which is an error otherwise.
            order: version of the order of documents.
        """
        if not documents.tokens:
            raise ConfigError(f'data: "{name}" has no tokens; remove it')
        self.name, self.documents, self.seq_len = name, documents, seq_len
        self.blocks = -(-len(documents) // BLOCK)
        self._half_window = len(documents) // (len(documents.windows) - 1) // 2
        self._last = None if epochs is None else epochs * self.blocks
        self._is_padded = is_padded
        self._order = functools.lru_cache(maxsize=2)(
            functools.partial(drawn_order, documents.windows, seed, shuffle=shuffle, version=order)
        )
        self.block = functools.lru_cache(maxsize=8)(self._read_block)

    def _read_block(self, number: int) -> Block:
        """Return a block, counted over all epochs."""
        epoch, block = divmod(number, self.blocks)
        places = np.arange(block * BLOCK, min((block + 1) * BLOCK, len(self.documents)))
        documents = np.asarray(self._order(epoch).at(places))
        later = np.minimum(places[-1:] + self._half_window, len(self.documents) - 1)
        self.documents.prefetch(np.append(documents, self._order(epoch).at(later)))
        return Block(documents, np.cumsum(self.documents.lengths(documents)))

    def documents_before(self, position: SourcePosition) -> int:
        """Return the number of documents, over all epochs, that were begun before a position."""
        begun = self._begun(position.epoch * self.blocks + position.block, position)
        return position.epoch * len(self.documents) + position.block * BLOCK + begun

    def _begun(self, block: int, position: SourcePosition) -> int:
        """Return the number of documents of a block that were begun before a position in it."""
        return int(np.searchsorted(self.block(block).ends, position.offset, side="right")) + 1

    def sample(self, block: int, offset: int) -> Sample:
        """Return the sample that starts at token `offset` of a block, counted over all epochs.

        Raises:
            ConfigError: if the source has ended, or a file is damaged.
        """
        size = self.seq_len + 1
        tokens, numbers = np.empty((2, size), np.int32)
        filled = count = cut = 0
        while filled < size:
            if self._has_ended(block):
                tokens[filled:], numbers[filled:] = 0, ENDED
                break
            documents, ends = self.block(block)
            begin, last = ends.searchsorted([offset + 1, offset + size - filled]).tolist()
            contents = self.documents.read_all(documents[begin : last + 1])
            for content, end in zip(contents, ends[begin : last + 1].tolist(), strict=True):
                if not len(content):
                    continue
                first = offset - end + len(content)
                part = content[first:][: size - filled]
                after = filled + len(part)
                if first:
                    cut = min(len(part), self.seq_len)
                tokens[filled:after], numbers[filled:after] = part, count
                filled, offset, count = after, end, count + 1
            block, offset = block + 1, 0
        return Sample(tokens, numbers, max(0, self.seq_len - filled), cut)

    def _has_ended(self, block: int) -> bool:
        """Whether a block is after the last, so that padding follows."""
        if self._last is None or block < self._last:
            return False
        if not self._is_padded:
            raise ConfigError(
                f'data.sources: "{self.name}" has ended: all of its '
                f"{self.documents.tokens:,} tokens were read, and it may not repeat; "
                "set repeat = true, or end the run here"
            )
        return True

    def cursor(self, start: SourcePosition) -> "Cursor":
        """Return the positions from `start` on."""
        return Cursor(self, start)


class Cursor:
    """Positions of the samples of a source from a starting position on."""

    def __init__(self, reader: TokenReader, start: SourcePosition) -> None:
        self.reader, self.start = reader, start
        self._first = start.epoch * reader.blocks + start.block
        self._begin, self._stride = start.offset, reader.seq_len
        self._ends: list[int] = []  # size of the first blocks up to the end of each
        self._lock = threading.Lock()

    def _size(self, block: int) -> int:
        """Return the size of a block, in the units of offsets."""
        return self.reader.block(block).tokens

    def locate(self, number: int) -> tuple[int, int]:
        """Return the block of sample `number`, counted over all epochs, and its offset there."""
        offset = self._begin + number * self._stride
        with self._lock:
            while not self._ends or self._ends[-1] <= offset:
                size = self._size(self._first + len(self._ends))
                self._ends.append((self._ends[-1] if self._ends else 0) + size)
            index = bisect_right(self._ends, offset)
        return self._first + index, offset - (self._ends[index - 1] if index else 0)

    def sample(self, number: int) -> Sample:
        """Return sample `number` from the starting position on."""
        return self.reader.sample(*self.locate(number))

    def position(self, number: int) -> SourcePosition:
        """Return the position of sample `number`."""
        if not number:
            return self.start
        block, offset = self.locate(number)
        return SourcePosition(*divmod(block, self.reader.blocks), offset)


class RowReader(TokenReader):
    """Rows of a source by their position; may be used by several threads."""

    def __init__(self, name: str, documents: TokenDocuments, **settings: Any) -> None:
        """`settings` are those of `TokenReader`."""
        super().__init__(name, documents, **settings)
        self.rows = functools.lru_cache(maxsize=8)(self._pack)

    def _pack(self, block: int, consumed: Consumed) -> Rows:
        """Pack a block, counted over all epochs, after what other sequence lengths consumed."""
        return pack_block(self._lengths(block), self.seq_len, consumed)

    def _lengths(self, block: int) -> Numbers:
        return np.diff(self.block(block).ends, prepend=0)

    def _begun(self, block: int, position: SourcePosition) -> int:
        lengths = self._lengths(block)
        left = pieces_left(lengths, position.rows)
        return len(lengths) - int(np.count_nonzero(left.counts == lengths[left.documents]))

    def row(self, block: int, number: int, consumed: Consumed) -> Sample:
        """Return a row as a sample.

        Raises:
            ConfigError: if the source has ended, or a file is damaged.
        """
        tokens, numbers = np.zeros((2, self.seq_len + 1), np.int32)
        filled = cut = 0
        repeated = []
        if not self._has_ended(block):
            pieces = self.rows(block, consumed)[number]
            documents = self.block(block).documents[pieces.documents]
            contents = zip(pieces, self.documents.read_all(documents), strict=True)
            for count, ((_, first, size), content) in enumerate(contents):
                after = filled + size
                tokens[filled:after], numbers[filled:after] = content[first : first + size], count
                if first:
                    cut += min(after, self.seq_len) - filled
                    repeated.append(filled)
                filled = after
        numbers[filled:] = ENDED
        padding = max(0, self.seq_len - filled)
        return Sample(tokens, numbers, padding, cut, tuple(repeated))

    def cursor(self, start: SourcePosition) -> "RowCursor":
        return RowCursor(self, start)


class RowCursor(Cursor):
    """Positions of the rows of a source from a starting position on."""

    reader: RowReader

    def __init__(self, reader: RowReader, start: SourcePosition) -> None:
        super().__init__(reader, start)
        consumed = [(length, rows) for length, rows in start.rows if rows]
        is_same = bool(consumed) and consumed[-1][0] == reader.seq_len
        self._begin, self._stride = consumed.pop()[1] if is_same else 0, 1
        self._consumed = tuple(consumed)

    def _before(self, block: int) -> Consumed:
        return self._consumed if block == self._first else ()

    def _size(self, block: int) -> int:
        return len(self.reader.rows(block, self._before(block)))

    def sample(self, number: int) -> Sample:
        block, row = self.locate(number)
        return self.reader.row(block, row, self._before(block))

    def position(self, number: int) -> SourcePosition:
        block, row = self.locate(number)
        rows = (*self._before(block), *([(self.reader.seq_len, row)] if row else []))
        return SourcePosition(*divmod(block, self.reader.blocks), 0, rows)
