"""Chooses the next token.

Logits are divided by the temperature; the `top_k` likeliest tokens are kept (Fan et al., 2018,
arXiv:1805.04833); of these as few as have the probability `top_p` together (Holtzman et al., 2020,
arXiv:1904.09751). One number between 0 and 1 then picks among them, in order of likelihood. Each
row has numbers of its own, from the seed and its place among the samples, so a sample depends on
neither the others nor the layout.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing tokens."""

    temperature: float = 1.0
    """Temperature; 0: always the likeliest token."""
    top_k: int = 0
    """Number of likeliest tokens to choose from; 0: all."""
    top_p: float = 1.0


def choose(logits: Tensor, numbers: Tensor, how: Sampling) -> Tensor:
    """Choose a token for each row.

    Args:
        logits: (B, V).
        numbers: (B,) float32, in [0, 1).

    Returns:
        (B,) int64.
    """
    if how.temperature == 0:
        return logits.argmax(-1)
    kept = min(how.top_k or logits.shape[-1], logits.shape[-1])
    likeliest, tokens = (logits.float() / how.temperature).topk(kept)
    probabilities = likeliest.softmax(-1)
    # A token is needed as long as those before it do not make up `top_p`; the first always is.
    before = probabilities.cumsum(-1) - probabilities
    before[:, 0] = -1.0
    probabilities = probabilities.where(before < how.top_p, 0.0)
    sums = probabilities.cumsum(-1)
    place = (sums <= numbers[:, None] * sums[:, -1:]).sum(-1)
    last = (probabilities > 0).sum(-1) - 1
    return tokens.gather(-1, torch.minimum(place, last)[:, None])[:, 0]


def generator_of(seed: int, *names: int) -> torch.Generator:
    """Make a generator that depends only on a seed and the place of a sample."""
    text = ".".join(map(str, (seed, *names)))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    return torch.Generator().manual_seed(number)
