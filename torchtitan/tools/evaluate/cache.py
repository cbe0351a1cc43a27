"""A cache of the keys and values of earlier tokens, so that the next token costs one position.

A token's keys and values depend only on the tokens before it. So they are kept by position, and a
new token is computed by itself: it stores its own at its position and attends to all up to it.

Rows of a batch may have different lengths. They are padded at their ends, where no token of the row
sees the padding; the row's next tokens overwrite the padding in the cache before they attend to it.
So no row depends on the other rows of its batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.attention import SelfAttention


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
        self, module: SelfAttention, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None
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
        mask = places <= self.positions[:, None, :, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


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
