"""One lane of a stream: documents packed into samples of tokens, or one sample each."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan.config import ConfigError
from torchtitan.data.order import Document, Position
from torchtitan.data.tokenizer import Tokenizer

Tokens = npt.NDArray[np.int32]

MOST_EMPTY_DOCUMENTS = 100_000
ENDED = -1
"""Placeholder for a document's number after the end of a lane that is read once."""


class SampleStart(NamedTuple):
    """Start of a lane's next sample: a document and an offset in its tokens, BOS included."""

    round: int
    document: int
    offset: int


class Sample(NamedTuple):
    """Next sample of a lane."""

    tokens: Tokens
    """(seq_len + 1,)"""
    documents: Tokens
    """(seq_len + 1,): 0 for tokens of the first document in the sample, 1 for the second, ...;
    `ENDED` where there is none."""
    lane: int
    after: SampleStart
    """State of the lane after this sample is consumed."""


def tokenized(
    documents: Iterator[Document], tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool
) -> Iterator[tuple[Position, Tokens]]:
    """Yield the tokens of each document between BOS and EOS; empty documents are skipped."""
    bos = [tokenizer.bos] if add_bos and tokenizer.bos is not None else []
    eos = [tokenizer.eos] if add_eos else []
    empty = 0
    for position, content in documents:
        body = tokenizer.encode(content) if isinstance(content, str) else content
        if len(body):
            empty = 0
            yield position, np.concatenate([np.asarray(t, np.int32) for t in (bos, body, eos)])
        else:
            empty += 1
            if empty == MOST_EMPTY_DOCUMENTS:
                raise ConfigError(f"data.dataset: it returned {empty} empty documents in a row")


class WholeSample(NamedTuple):
    """Sample that is one document."""

    content: Any
    lane: int
    after: SampleStart


class WholeLane:
    """Lane whose samples are its documents, one each."""

    def __init__(
        self, number: int, documents: Iterator[Document], start: SampleStart | None
    ) -> None:
        self._number = number
        # A record names the document that was consumed last.
        self._documents = itertools.islice(documents, 0 if start is None else 1, None)

    def next_sample(self) -> WholeSample:
        position, content = next(self._documents)
        return WholeSample(content, self._number, SampleStart(*position, 1))


class Lane:
    """Packs the documents of one lane into samples of seq_len + 1 tokens, which overlap by one."""

    def __init__(
        self,
        number: int,
        documents: Iterator[tuple[Position, Tokens]],
        seq_len: int,
        start: SampleStart | None,
    ) -> None:
        self._number = number
        self._documents = documents
        self._length = seq_len + 1
        self._current: tuple[Position, Tokens] | None = None
        self._offset = start.offset if start else 0  # consumed tokens of the current document
        self._after = start or SampleStart(0, 0, 0)

    def next_sample(self) -> Sample:
        sample, documents = np.empty((2, self._length), np.int32)
        filled = document = 0
        while True:
            if self._current is None:
                self._current = next(self._documents, None)
            if self._current is None:
                sample[filled:], documents[filled:] = 0, ENDED
                return Sample(sample, documents, self._number, self._after)
            position, tokens = self._current
            part = tokens[self._offset : self._offset + self._length - filled]
            sample[filled : filled + len(part)] = part
            documents[filled : filled + len(part)] = document
            filled += len(part)
            if filled == self._length:
                # The last token stays: the next sample starts with it.
                self._offset += len(part) - 1
                self._after = SampleStart(*position, self._offset)
                return Sample(sample, documents, self._number, self._after)
            self._current, self._offset, document = None, 0, document + 1
