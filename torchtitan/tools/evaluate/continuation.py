"""Continues texts, token by token.

The keys and values of earlier tokens are cached, so that the next token costs one position. They
depend only on the tokens before theirs. So they are kept by position, and a new token is computed
by itself: it stores its own at its position and attends to all up to it.

Rows of a batch may have different lengths. They are padded at their ends, where no token of the row
sees the padding; the row's next tokens overwrite the padding in the cache before they attend to it.
So no row depends on the other rows of its batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from torchtitan.models.attention import SelfAttention, masked_attention
from torchtitan.tools.evaluate.inference import InferenceModel, padded
from torchtitan.tools.evaluate.sampling import Sampling, choose


class Cache:
    """Keys and values of a batch for each attention of a model; a rank has those of its heads."""

    def __init__(self, length: int) -> None:
        """`length` is the maximum sequence length."""
        self.length = length
        self.kept: dict[SelfAttention, tuple[Tensor, Tensor]] = {}
        self.positions = torch.empty(0)
        self.end = 0

    def move_to(self, positions: Tensor, end: int) -> None:
        """Set the positions (B, S) of the tokens that are read next, all before `end`."""
        self.positions, self.end = positions, end

    def attend(
        self,
        module: SelfAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Like `causal_attention`, from the tokens at `positions` to all up to them."""
        if module not in self.kept:
            shape = (*k.shape[:2], self.length, k.shape[3])
            self.kept[module] = k.new_zeros(shape), v.new_zeros(shape)
        rows = torch.arange(len(q), device=q.device)[:, None]
        for kept, new in zip(self.kept[module], (k, v), strict=True):
            kept[rows, :, self.positions] = new.transpose(1, 2)
        keys, values = (kept[:, :, : self.end] for kept in self.kept[module])
        places = torch.arange(self.end, device=q.device)
        queries = self.positions[:, None, :, None]
        mask = places <= queries
        if window:
            mask &= places > queries - window
        return masked_attention(q, keys, values, mask, sinks)


@contextmanager
def cached(network: nn.Module, length: int) -> Iterator[Cache]:
    """Let the attention of `network` use a cache inside the block."""
    cache = Cache(length)
    attentions = [module for module in network.modules() if isinstance(module, SelfAttention)]
    cores = [module.core for module in attentions]
    for module in attentions:
        module.core = partial(cache.attend, module)
    try:
        yield cache
    finally:
        for module, core in zip(attentions, cores, strict=True):
            module.core = core


PREFILL_CHUNK = 512
"""Tokens of a prompt that are read together, which bounds the memory of their logits."""


@dataclass
class Row:
    """A text, and its continuation."""

    prompt: Sequence[int]
    random: torch.Generator
    tokens: list[int] = field(default_factory=list)
    ended: Literal["end of text", "stopped", "length"] | None = None
    """The reason why it is not continued."""


def generate(
    model: InferenceModel,
    rows: Sequence[Row],
    most: int,
    how: Sampling,
    *,
    is_enough: Callable[[Row], bool] = lambda row: False,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Continue all `rows` until each has ended; a token that ends a text is left out.

    Args:
        most: maximum number of new tokens in a row.
        is_enough: called after each new token; whether the row stops there.
        after_step: called when every row has one more token or has ended.
    """
    lengths = torch.tensor([len(row.prompt) for row in rows], device=model.device)
    longest = max(len(row.prompt) for row in rows)
    with cached(model.network, longest + most) as cache:
        logits = read(model, cache, [row.prompt for row in rows])
        for step in range(most):
            # Ids that the tokenizer does not know are padding of the vocabulary.
            chosen = _choose(model, rows, logits[:, : model.vocabulary], how)
            for row, token in zip(rows, chosen.tolist(), strict=True):
                if row.ended is None:
                    _add(row, token, model.subject.ends, is_enough, most)
            after_step()
            if all(row.ended for row in rows):
                return
            positions = (lengths + step)[:, None]
            cache.move_to(positions, longest + step + 1)
            logits = model.logits(chosen[:, None], positions)[:, -1]


def read(model: InferenceModel, cache: Cache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Read prompts into the cache; the logits of the token after each of them, (B, V)."""
    tokens = padded(prompts, model.device)
    rows, longest = tokens.shape
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=model.device)
    found: Tensor | None = None
    for start in range(0, longest, PREFILL_CHUNK):
        end = min(start + PREFILL_CHUNK, longest)
        positions = torch.arange(start, end, device=model.device).expand(rows, -1)
        cache.move_to(positions, end)
        logits = model.logits(tokens[:, start:end], positions)
        found = torch.zeros_like(logits[:, 0]) if found is None else found
        place = (last - start).clamp(0, end - start - 1)
        nearest = logits[torch.arange(rows, device=model.device), place]
        # Of the parts that do not begin after a prompt's end, the last has its end.
        found = torch.where((last >= start)[:, None], nearest, found)
    assert found is not None, "a prompt has at least one token"
    return found


def _choose(model: InferenceModel, rows: Sequence[Row], logits: Tensor, how: Sampling) -> Tensor:
    numbers = torch.cat([torch.rand(1, generator=row.random) for row in rows])
    return choose(logits, numbers.to(model.device), how)


def _add(
    row: Row, token: int, ends: frozenset[int], is_enough: Callable[[Row], bool], most: int
) -> None:
    if token in ends:
        row.ended = "end of text"
        return
    row.tokens.append(token)
    if is_enough(row):
        row.ended = "stopped"
    elif len(row.tokens) == most:
        row.ended = "length"
