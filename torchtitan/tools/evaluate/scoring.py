"""Computes the likelihood of texts under a model.

Each target is scored given all tokens before it, or as many as fit into a sequence. A text that is
longer than a sequence is scored in windows: each starts where the previous one ended, so that every
token is counted once, with as much context as possible.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.tools.evaluate.inference import InferenceModel, padded


class Window(NamedTuple):
    """Tokens to read, and targets to score: the tokens after the last of them."""

    tokens: list[int]
    targets: list[int]


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
    model: InferenceModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]], rows: int
) -> list[float]:
    """Return the log-probability in nats of each text, given as a pair of context and target.

    Args:
        rows: number of windows that are read together.
    """
    cut = [
        (number, window)
        for number, (context, text) in enumerate(texts)
        for window in windows(context, text, model.length)
    ]
    # Long ones first: what is too large shows at once, and little is spent on filling up.
    cut.sort(key=lambda one: -len(one[1].tokens))
    found = [0.0] * len(texts)
    for start in range(0, len(cut), rows):
        batch = cut[start : start + rows]
        logits = model.logits(padded([window.tokens for _, window in batch], model.device))
        for row, (number, window) in zip(logits, batch, strict=True):
            found[number] += _score(row, window)
    return found


def _score(logits: Tensor, window: Window) -> float:
    """Score one window from its logits (S, V), which may be padded at the end."""
    end = len(window.tokens)
    mine = logits[end - len(window.targets) : end].float()
    targets = torch.tensor(window.targets, device=logits.device)
    return float(mine.log_softmax(-1).gather(-1, targets[:, None]).double().sum())
