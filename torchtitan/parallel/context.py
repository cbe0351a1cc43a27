"""Context parallelism: each rank holds a part of every sequence, and attention spans the ranks.

A rank keeps its queries and receives the keys and values of the others. Attention over one rank's
keys gives an output o and the log-sum-exp l of its scores; two such results merge exactly, in any
order, to l = log(exp l1 + exp l2) and o = exp(l1 - l) o1 + exp(l2 - l) o2. In the backward, each
part needs only the merged o and l to compute its share of the gradients (Ring Attention with
Blockwise Transformers, Liu et al., 2023, arXiv:2310.01889).

Under the causal mask, contiguous parts would give the last rank the most work and the first hardly
any. With `headtail` a sequence is cut into two chunks per rank, and rank r of n takes chunk r and
its mirror 2n - 1 - r (the aim of Striped Attention, Brandon et al., 2023, arXiv:2311.09431, in
larger pieces). All queries then attend to the first half of the keys of an earlier rank, and the
second half of the queries to all keys of a later one: one rectangle per rank, all of equal size.

Shapes: B batch, S this rank's part of the sequence, H query heads, K key/value heads, E head dim.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.models.attention import SelfAttention
from torchtitan.parallel.context_rotation import ROTATIONS, Owned
from torchtitan.parallel.settings import Balancing, Rotation
from torchtitan.tasks import Batch
from torchtitan.torch_private.attention_kernels import attention_backward, attention_forward
from torchtitan.torch_private.collectives import all_gather, process_group


def apply(model: nn.Module, group: ProcessGroup, rotation: Rotation, balancing: Balancing) -> int:
    """Make all attention modules of `model` span the ranks of `group`; return their number."""
    assert group.size() > 1, "one rank has the whole sequence"
    name = group.group_name

    def core(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        out: Tensor = context_attention(q, k, v, documents, name, rotation, balancing)[0]
        return out

    modules = [module for module in model.modules() if isinstance(module, SelfAttention)]
    assert modules, "a model attends by SelfAttention, or its sequences cannot be split"
    for module in modules:
        module.core = core
    return len(modules)


def shard(batch: Batch, rank: int, size: int, balancing: Balancing) -> Batch:
    """Return one rank's part of the sequences."""
    return batch if size == 1 else batch.shard(partial(Cut(size, balancing).part, rank=rank))


def following(x: Tensor, group: ProcessGroup, balancing: Balancing) -> Tensor:
    """Return the values at each position's successor in the whole sequence; zeros after the last.

    Args:
        x: this rank's part (B, S, D), without a gradient.
    """
    cut = Cut(group.size(), balancing)
    pieces = x.chunk(len(cut.owned(group.rank())), dim=1)
    firsts = all_gather(torch.stack([piece[:, 0] for piece in pieces]), group)
    first = {
        index: firsts[rank, place]
        for rank in range(group.size())
        for place, index in enumerate(cut.owned(rank))
    }
    zeros = torch.zeros_like(x[:, 0])
    parts: list[Tensor] = []
    for piece, index in zip(pieces, cut.owned(group.rank()), strict=True):
        parts += [piece[:, 1:], first.get(index + 1, zeros)[:, None]]
    return torch.cat(parts, dim=1)


class Tile(NamedTuple):
    """Queries of one rank and keys of another; if `causal`, each attends up to its own position."""

    queries: slice
    keys: slice
    causal: bool


@dataclasses.dataclass(frozen=True)
class Cut:
    """Partitioning of a sequence among `size` ranks."""

    size: int
    balancing: str

    @property
    def chunks(self) -> int:
        """Number of equal pieces, which divides the length of a sequence."""
        return self.size if self.balancing == "none" or self.size == 1 else 2 * self.size

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Return the part of `whole` (B, whole sequence) that `rank` owns: (B, S)."""
        assert whole.shape[1] % self.chunks == 0, f"{whole.shape[1]} not in {self.chunks} chunks"
        pieces = whole.chunk(self.chunks, dim=1)
        return torch.cat([pieces[index] for index in self.owned(rank)], dim=1)

    def owned(self, rank: int) -> tuple[int, ...]:
        """Return the indices of a rank's pieces, in order."""
        return (rank,) if self.chunks == self.size else (rank, self.chunks - 1 - rank)

    def tile(self, rank: int, owner: int, length: int) -> Tile | None:
        """Return the queries of `rank` that attend to keys of `owner`, both `length` long, if any.

        Parts keep the order of the sequence, so a rank's own tile is an ordinary causal one.
        """
        whole, half = slice(0, length), length // 2
        if owner == rank:
            return Tile(whole, whole, causal=True)
        if self.balancing == "none":
            return Tile(whole, whole, causal=False) if owner < rank else None
        if owner < rank:
            return Tile(whole, slice(0, half), causal=False)
        return Tile(slice(half, length), whole, causal=False)

    def bias(
        self, documents: Tensor | None, tile: Tile, rank: int, owner: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the additive mask that separates documents in a tile: (B, 1, queries, keys).

        It is finite: a query that attends to no key of a tile gets a log-sum-exp so low that its
        output vanishes in the merge; kernels differ in their results for minus infinity.
        """
        if documents is None:
            return None
        queries = self.part(documents, rank)[:, tile.queries, None]
        keys = self.part(documents, owner)[:, None, tile.keys]
        seen = queries == keys
        seen = seen.tril() if tile.causal else seen
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return bias.masked_fill_(~seen, torch.finfo(dtype).min / 2)[:, None]


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which attention is accumulated: float32 or wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


@torch.library.custom_op("torchtitan::context_attention", mutates_args=())
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    group_name: str,
    rotation: str,
    balancing: str,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of this rank's queries to the keys of all ranks of a group.

    It is an operator so that compiled blocks can contain it and recomputation can skip it.

    Args:
        q: (B, H, S, E).
        k, v: (B, K, S, E); each serves H/K query heads.
        documents: (B, whole sequence) int64, the document of each token; None: a single document.
        group_name: name of the process group.
        rotation: a key of `ROTATIONS`.
        balancing: the partitioning used by `shard`.

    Returns:
        The output (B, H, S, E), and the log-sum-exp of the scores (B, H, S) in fp32.
    """
    group = process_group(group_name)
    rank, cut = group.rank(), Cut(group.size(), balancing)
    fetch, _ = ROTATIONS[rotation]
    out = torch.zeros_like(q, dtype=_wide(q))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=_wide(q))
    for owner, kv in fetch(torch.stack((k, v)), group):
        tile = cut.tile(rank, owner, q.shape[2])
        if tile is None:
            continue
        rows = tile.queries
        bias = cut.bias(documents, tile, rank, owner, q.dtype)
        keys, values = kv[..., tile.keys, :]
        part, part_lse = attention_forward(
            q[:, :, rows], keys, values, causal=tile.causal and bias is None, bias=bias
        )
        total = torch.logaddexp(lse[:, :, rows], part_lse)
        out[:, :, rows] *= (lse[:, :, rows] - total).exp()[..., None]
        out[:, :, rows] += (part_lse - total).exp()[..., None] * part
        lse[:, :, rows] = total
    return out.to(q.dtype), lse


@context_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=_wide(q))


@torch.library.custom_op("torchtitan::context_attention_backward", mutates_args=())
def context_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    group_name: str,
    rotation: str,
    balancing: str,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of q, and of k and v as one tensor (2, B, K, S, E).

    Keys and values are exchanged again, since keeping all ranks' would cost the memory that
    splitting the sequence saved. Gradients are sent and summed in fp32.
    """
    group = process_group(group_name)
    rank, cut = group.rank(), Cut(group.size(), balancing)
    fetch, bring_back = ROTATIONS[rotation]
    grad_q = torch.zeros_like(q, dtype=_wide(q))

    def gradients() -> Owned:
        for owner, kv in fetch(torch.stack((k, v)), group):
            grad_kv = torch.zeros_like(kv, dtype=_wide(kv))
            tile = cut.tile(rank, owner, q.shape[2])
            if tile is not None:
                rows, columns, causal = tile
                bias = cut.bias(documents, tile, rank, owner, q.dtype)
                keys, values = kv[..., columns, :]
                of_q, of_k, of_v = attention_backward(
                    grad_out[:, :, rows],
                    q[:, :, rows],
                    keys,
                    values,
                    out[:, :, rows],
                    lse[:, :, rows],
                    causal=causal and bias is None,
                    bias=bias,
                )
                grad_q[:, :, rows] += of_q
                grad_kv[0, :, :, columns] = of_k
                grad_kv[1, :, :, columns] = of_v
            yield owner, grad_kv

    grad_kv = bring_back(gradients(), group)
    return grad_q.to(q.dtype), grad_kv.to(k.dtype)


@context_attention_backward.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), k.new_empty(2, *k.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.group_name, ctx.rotation, ctx.balancing = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_q, grad_kv = context_attention_backward(
        grad_out, *ctx.saved_tensors, ctx.group_name, ctx.rotation, ctx.balancing
    )
    return grad_q, *grad_kv.unbind(), None, None, None, None


context_attention.register_autograd(_differentiate, setup_context=_save)
