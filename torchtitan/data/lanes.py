"""One lane of a stream: documents packed into samples of tokens, or one sample each."""

import itertools
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan.config import ConfigError
from torchtitan.data.order import Document, Position
from torchtitan.data.tokenizer import Tokenizer, leading_tokens, separators

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
    """Sample of seq_len inputs and, one to the right, as many targets."""

    tokens: Tokens
    """(seq_len + 1,)"""
    documents: Tokens
    """(seq_len + 1,): 0 for tokens of the first document in the sample, 1 for the second, ...;
    `ENDED` where there is none."""
    padding: int = 0
    """Number of inputs that are padding."""
    cut: int = 0
    """Number of inputs whose document starts in another sample."""
    repeated: tuple[int, ...] = ()
    """Places of tokens that are targets in another sample."""
    lane: int = 0
    after: SampleStart = SampleStart(0, 0, 0)
    """State of the lane after this sample is consumed, if it is from a lane."""


def tokenized(
    documents: Iterator[Document],
    tokenizer: Tokenizer,
    *,
    add_bos: bool | None,
    add_eos: bool | None,
    vocab_size: int | None = None,
) -> Iterator[tuple[Position, Tokens]]:
    """Yield the tokens of each document between BOS and EOS; empty documents are skipped.

    Args:
        add_bos: as of `separators`, also `add_eos`.
        vocab_size: limit of the ids in documents that are tokens. Default: that of the tokenizer.
    """
    limit = vocab_size or tokenizer.vocab_size
    bos = np.array(leading_tokens(tokenizer, add_bos, add_eos), np.int32)
    has_eos = separators(tokenizer, add_bos, add_eos)[1]
    eos = np.array([tokenizer.eos] if has_eos else [], np.int32)
    empty = 0
    for position, content in documents:
        if isinstance(content, str):
            # An `array` takes a third of the time of numpy, which inspects the type of each item.
            body = np.frombuffer(array("i", tokenizer.encode(content)), np.int32)
        else:
            body = np.asarray(content)
            check_tokens(body, limit, position)
        if len(body):
            empty = 0
            yield position, np.concatenate([bos, body.astype(np.int32, copy=False), eos])
        else:
            empty += 1
            if empty == MOST_EMPTY_DOCUMENTS:
                raise ConfigError(f"data.dataset: it returned {empty} empty documents in a row")


def check_tokens(tokens: npt.NDArray[Any], vocab_size: int, position: Position) -> None:
    """Refuse a document with a token that has no row in an embedding of `vocab_size`."""
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise ConfigError(
            f"data.dataset: document {position.document} is {type(tokens.tolist()).__name__}; "
            "wanted a string, or a list of tokens"
        )
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        place = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0]
        raise ConfigError(
            f"data.dataset: document {position.document} of round {position.round} has the token "
            f"{tokens[place]} at {place}, outside of the model's vocabulary of {vocab_size}; "
            "correct the source, or use a model with a larger vocabulary"
        )


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
        filled = document = cut = 0
        while True:
            if self._current is None:
                self._current = next(self._documents, None)
            if self._current is None:
                sample[filled:], documents[filled:] = 0, ENDED
                padding = max(0, self._length - 1 - filled)
                return Sample(sample, documents, padding, cut, (), self._number, self._after)
            position, tokens = self._current
            part = tokens[self._offset : self._offset + self._length - filled]
            if self._offset:
                cut = min(len(part), self._length - 1)
            sample[filled : filled + len(part)] = part
            documents[filled : filled + len(part)] = document
            filled += len(part)
            if filled == self._length:
                # The last token stays: the next sample starts with it.
                self._offset += len(part) - 1
                self._after = SampleStart(*position, self._offset)
                return Sample(sample, documents, 0, cut, (), self._number, self._after)
            self._current, self._offset, document = None, 0, document + 1
