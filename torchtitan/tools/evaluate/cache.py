"""Keys and values of tokens that were read already, so that the next one costs one position.

A token's keys and values depend on what stands before it alone. So they are kept by position, and
a new token is computed by itself: it puts its own at its position and attends to all up to it.

Rows of a batch may be of different lengths. They are filled up at their ends, where no token of the
row sees the filling; what the filling left in the cache, the row's next tokens overwrite before
they come to see it. So no row knows what it is in a batch with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.attention import SelfAttention


class Cache:
    """Of each attention of a model, the keys and values of a batch; each rank has its heads'."""

    def __init__(self, length: int) -> None:
        """`length` is that of the longest sequence."""
        self.length = length
        self.kept: dict[SelfAttention, tuple[Tensor, Tensor]] = {}
        self.positions = torch.empty(0)
        self.end = 0

    def move_to(self, positions: Tensor, end: int) -> None:
        """Tell where the tokens that are read next stand: (B, S), all before `end`."""
        self.positions, self.end = positions, end

    def attend(
        self, module: SelfAttention, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None
    ) -> Tensor:
        """As `causal_attention`, of the tokens at `positions` to all up to them."""
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
    """Have the attention of `network` remember, until the end of the block."""
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
