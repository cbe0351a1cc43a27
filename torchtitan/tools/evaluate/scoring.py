"""How likely texts are to a model.

What is scored are targets, each given all tokens before it, or as many of them as a sequence has
room for. A text that is longer than a sequence is scored in windows: each takes on where the one
before it ended, so that every token is counted once, and looks back as far as it can.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.tools.evaluate.layout import Model, padded


class Window(NamedTuple):
    """Tokens to read, and what is scored: what came after the last of them."""

    tokens: list[int]
    targets: list[int]


class Score(NamedTuple):
    """Of a text, or a part of it."""

    log_probability: float
    """In nats."""
    is_likeliest: bool
    """Whether each token is the likeliest at its place."""


def windows(context: Sequence[int], text: Sequence[int], length: int) -> Iterator[Window]:
    """What is read to score `text` after `context`, which has a token at least.

    Args:
        length: how many tokens the model reads at most; of the context the last are kept.
    """
    whole, first = [*context, *text], len(context)
    assert first, "the first token of a text has to come after something"
    while first < len(whole):
        end = min(first + length, len(whole))
        start = max(end - 1 - length, 0)
        yield Window(whole[start : end - 1], whole[first:end])
        first = end


def score_texts(
    model: Model,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    rows: int,
    after_batch: Callable[[int, int], None] = lambda some, of: None,
) -> list[Score]:
    """Of each text, (context, what is scored), however many windows it takes.

    Args:
        rows: windows that are read together.
        after_batch: called with how many windows were read, of how many.
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


def score_windows(model: Model, batch: Sequence[Window]) -> list[Score]:
    """The scores of windows that are read together."""
    logits = model.logits(padded([window.tokens for window in batch], model.device))
    return [_score(row, window) for row, window in zip(logits, batch, strict=True)]


def _score(logits: Tensor, window: Window) -> Score:
    """Of one window, from the logits (S, V) of what is read, which may be filled up at its end."""
    end = len(window.tokens)
    mine = logits[end - len(window.targets) : end].float()
    targets = torch.tensor(window.targets, device=logits.device)
    found = mine.log_softmax(-1).gather(-1, targets[:, None]).double().sum()
    return Score(float(found), bool((mine.argmax(-1) == targets).all()))
