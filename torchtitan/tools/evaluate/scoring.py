"""Computes the likelihood of texts under a model.

Each target is scored given all tokens before it, or as many as fit into a sequence. A text that is
longer than a sequence is scored in windows: each starts where the previous one ended, so that every
token is counted once, with as much context as possible.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.tools.evaluate.inference import InferenceModel, padded


class Window(NamedTuple):
    """Tokens to read, and targets to score: the tokens after the last of them."""

    tokens: list[int]
    targets: list[int]


class Score(NamedTuple):
    """The score of a text, or of a part of it."""

    log_probability: float
    """Log-probability in nats."""
    is_likeliest: bool
    """Whether each token is the likeliest at its place."""


def windows(context: Sequence[int], text: Sequence[int], length: int) -> Iterator[Window]:
    """Split `text` after `context`, which has at least one token, into windows.

    Args:
        length: maximum number of tokens that the model reads; the context is cut at its start.
    """
    whole, first = [*context, *text], len(context)
    assert first, "the first token of a text has to come after something"
    while first < len(whole):
        end = min(first + length, len(whole))
        start = max(end - 1 - length, 0)
        yield Window(whole[start : end - 1], whole[first:end])
        first = end


def score_texts(
    model: InferenceModel,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    rows: int,
    after_batch: Callable[[int, int], None] = lambda some, of: None,
) -> list[Score]:
    """Score texts, given as pairs of context and target, in as many windows as needed.

    Args:
        rows: number of windows that are read together.
        after_batch: called with the number of windows in a batch and in total.
    """
    cut = [
        (number, window)
        for number, (context, text) in enumerate(texts)
        for window in windows(context, text, model.length)
    ]
    # Long ones first: what is too large shows at once, and little is spent on filling up.
    cut.sort(key=lambda one: -len(one[1].tokens))
    found = [Score(0.0, True)] * len(texts)
    for start in range(0, len(cut), rows):
        batch = cut[start : start + rows]
        scores = score_windows(model, [window for _, window in batch])
        for (number, _), score in zip(batch, scores, strict=True):
            so_far = found[number]
            is_likeliest = so_far.is_likeliest and score.is_likeliest
            total = so_far.log_probability + score.log_probability
            found[number] = Score(total, is_likeliest)
        after_batch(len(batch), len(cut))
    return found


def score_windows(model: InferenceModel, batch: Sequence[Window]) -> list[Score]:
    """Score windows that are read together."""
    logits = model.logits(padded([window.tokens for window in batch], model.device))
    return [_score(row, window) for row, window in zip(logits, batch, strict=True)]


def _score(logits: Tensor, window: Window) -> Score:
    """Score one window from its logits (S, V), which may be padded at the end."""
    end = len(window.tokens)
    mine = logits[end - len(window.targets) : end].float()
    targets = torch.tensor(window.targets, device=logits.device)
    found = mine.log_softmax(-1).gather(-1, targets[:, None]).double().sum()
    return Score(float(found), bool((mine.argmax(-1) == targets).all()))
