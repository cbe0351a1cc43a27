"""The largest attention logit of each head in a step, for `scaling`, which limits it.

A logit is q k' / sqrt(E), an input of attention's softmax. Attention kernels do not keep logits, so
they are computed again, one tile of the S x S at a time, without a gradient. Only logits of keys
that a query attends to count, over all microbatches of a step; recomputing a block in the backward
does not change a maximum.

Shapes: B batch, S this rank's part of the sequence, H query heads, K key/value heads, E head dim.
"""

import itertools
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from torchtitan.models.attention import Core, SelfAttention
from torchtitan.parallel.activation_checkpoint import KEPT_OPERATORS
from torchtitan.parallel.context_pieces import ROTATIONS, Cut, segments
from torchtitan.parallel.settings import ParallelismConfig
from torchtitan.parallel.world import World
from torchtitan.torch_private.distributed import process_group

TILE = 2**24
"""Number of logits in memory at a time: 64 MiB."""


class LargestLogits:
    """Records the largest logits of all attention modules during training."""

    def __init__(
        self,
        parts: Iterable[nn.Module],
        heads: Mapping[str, int],
        world: World,
        parallelism: ParallelismConfig,
    ) -> None:
        """
        Args:
            parts: this rank's parts of the model.
            heads: number of query heads of each attention module, in all stages.
        """
        self.world, self.places, begin = world, dict[str, slice](), 0
        for name, count in heads.items():
            self.places[name] = slice(begin, begin + count)
            begin += count
        device, tensor_rank = world.device.torch_device, world.groups["tp"].rank()
        self.mine: list[tuple[slice, Tensor]] = []
        self.all = torch.empty(begin, device=device)
        """Maxima of shape (heads of the model,), in float32."""
        for part in parts:
            for name, module in attentions(part):
                place, own = self.places[name], heads[name] // world.degrees.tp
                first = place.start + tensor_rank * own
                largest = torch.empty(own, device=device)
                self.mine.append((slice(first, first + own), largest))
                module.core = Watched(module.core, largest, world, parallelism)

    def begin(self) -> None:
        """Reset the maxima."""
        for _, largest in self.mine:
            largest.fill_(-torch.inf)

    def agree(self) -> Tensor:
        """Return the maximum of each head over all ranks' tokens: (heads,), equal on all ranks."""
        self.all.fill_(-torch.inf)
        for place, largest in self.mine:
            self.all[place] = largest
        return self.world.max(self.all)


def attentions(part: nn.Module) -> Iterable[tuple[str, SelfAttention]]:
    """Yield the attention modules of a model or a part of it, with their parents' names."""
    for name, module in part.named_modules():
        if isinstance(module, SelfAttention):
            yield name.rpartition(".")[0], module


class Watched:
    """Attention core that records its largest logits."""

    def __init__(
        self, core: Core, largest: Tensor, world: World, parallelism: ParallelismConfig
    ) -> None:
        """Update `largest` (H,) in place on each call."""
        self.core, self.largest = core, largest
        is_split = world.degrees.cp > 1
        self.group = world.groups["cp"].group_name if is_split else ""
        is_ring = parallelism.context_parallel_rotate_method == "ring"
        self.rotation = "ring" if is_ring else "allgather"
        self.balancing = parallelism.balancing

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if torch.is_grad_enabled():  # not in evaluation
            found = largest_logits(
                *(q.detach(), k.detach(), documents),
                *(self.group, self.rotation, self.balancing, window),
            )
            with torch.no_grad():
                self.largest.copy_(torch.maximum(self.largest, found))
        return self.core(q, k, v, documents, window, sinks)


@torch.library.custom_op("torchtitan::largest_logits", mutates_args=())
def largest_logits(
    q: Tensor,
    k: Tensor,
    documents: Tensor | None,
    group_name: str,
    rotation: str,
    balancing: str,
    window: int = 0,
) -> Tensor:
    """Return the largest logit of each of this rank's query heads: (H,), in float32.

    It is an operator so that compiled blocks can contain it and recomputation can skip it.

    Args:
        q: (B, H, S, E).
        k: (B, K, S, E); each serves H/K query heads.
        documents: (B, whole sequence) int64, the document of each token, on the CPU; None: a
            single document.
        group_name: name of the group whose ranks share the sequence; empty if there is none.
        rotation: exchange of keys between ranks, a key of `ROTATIONS`.
        balancing: the partitioning used by `context.shard`.
        window: number of most recent tokens that a token attends to; 0: all.
    """
    group = process_group(group_name) if group_name else None
    rank, cut = (group.rank(), Cut(group.size(), balancing)) if group else (0, Cut(1, balancing))
    fetched = ROTATIONS[rotation][0](k.contiguous(), group) if group else iter([(0, k)])
    largest = q.new_full(q.shape[1:2], -torch.inf, dtype=torch.float32)
    rows = cut.masked(q, documents, window)
    for owner, keys in fetched:
        tile = None if rows else cut.tile(rank, owner, q.shape[2])
        if tile is not None:
            shift = 0 if tile.causal else keys.shape[2]
            found = _largest(q[:, :, tile.queries], keys[:, :, tile.keys], shift)
            largest = torch.maximum(largest, found)
        pairs = itertools.chain(*segments(rows, rank, owner, window)) if rows else ()
        for row, queries, seen, shift, limit in pairs:
            own, others = q[row, None, :, slice(*queries)], keys[row, None, :, slice(*seen)]
            found = _largest(own, others, shift + queries[0] - seen[0], limit)
            largest = torch.maximum(largest, found)
    return largest


@largest_logits.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[1:2], dtype=torch.float32)


KEPT_OPERATORS.add(torch.ops.torchtitan.largest_logits.default)


def _largest(q: Tensor, k: Tensor, shift: int, window: int = 0) -> Tensor:
    """Return each head's maximum (H,); query i sees key j as in a `Segment`."""
    (batch, heads, queries, dim), (groups, keys) = q.shape, k.shape[1:3]
    largest = q.new_full((heads,), -torch.inf, dtype=torch.float32)
    k = k.float().mT  # (B, K, E, keys)
    step = max(1, TILE // (batch * heads * keys))
    for begin in range(0, queries, step):
        rows = q[:, :, begin : begin + step].float()  # (B, H, rows, E)
        count, first = rows.shape[2], begin + shift
        stop = min(first + rows.shape[2], keys)
        logits = rows.reshape(batch, groups, -1, dim) @ k[..., :stop]  # (B, K, H/K rows, keys)
        logits = logits.view(batch, heads, count, stop)
        hidden = torch.ones(count, stop, dtype=torch.bool, device=q.device)
        if first + 1 < stop:
            logits.masked_fill_(hidden.triu(first + 1), -torch.inf)
        if window:
            logits.masked_fill_(hidden.tril(first - window), -torch.inf)
        largest = torch.maximum(largest, logits.amax((0, 2, 3)))
    return largest / math.sqrt(dim)
