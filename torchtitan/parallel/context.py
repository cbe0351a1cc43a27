"""Context parallelism: each rank holds a part of every sequence, and attention spans the ranks.

A rank keeps its queries and receives the keys and values of the others. Attention over one rank's
keys gives an output o and the log-sum-exp l of its scores; two such results merge exactly, in any
order, to l = log(exp l1 + exp l2) and o = exp(l1 - l) o1 + exp(l2 - l) o2. In the backward, each
part needs only the merged o and l to compute its share of the gradients (Ring Attention with
Blockwise Transformers, Liu et al., 2023, arXiv:2310.01889). With `ulysses`, ranks exchange heads
instead: see the module of that name.

Shapes: B batch, S this rank's part of the sequence, H query heads, K key/value heads, E head dim.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.models.attention import Core, SelfAttention, add_sinks, gradient_of_sinks
from torchtitan.parallel.activation_checkpoint import KEPT_OPERATORS
from torchtitan.parallel.context_pieces import ROTATIONS, Cut, Owned, segments
from torchtitan.parallel.settings import Balancing, Rotation
from torchtitan.tasks import Batch
from torchtitan.torch_private.attention_kernels import attention_backward, attention_forward
from torchtitan.torch_private.distributed import all_gather, process_group
from torchtitan.torch_private.segment_kernels import segments_backward, segments_forward, wide


def exchanging_heads(core: Core, group: ProcessGroup) -> Core:
    """Return a core for contiguous parts of sequences, which uses `core` for whole ones."""
    rank, size, name = group.rank(), group.size(), group.group_name

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        heads = q.shape[1]
        if k.shape[1] < size:  # each is needed by several ranks
            k, v = (x.repeat_interleave(size // x.shape[1], dim=1) for x in (k, v))
        parts = torch.cat([torch.unflatten(x, 1, (size, -1)) for x in (q, k, v)], dim=2)
        parts = all_to_all(parts.transpose(0, 1).contiguous(), name)  # (n, B, (H + 2 K) / n, S, E)
        whole = parts.permute(1, 2, 0, 3, 4).flatten(2, 3)  # (B, (H + 2 K) / n, n S, E)
        q, k, v = whole.split([x.shape[1] // size for x in (q, k, v)], dim=1)
        own_sinks = None if sinks is None else sinks.view(size, -1)[rank]
        out = core(q, k, v, documents, window, own_sinks)
        parts = torch.unflatten(out, 2, (size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        own: Tensor = all_to_all(parts, name)  # (n, B, H / n, S, E)
        return own.transpose(0, 1).reshape(len(q), heads, -1, q.shape[-1])

    return attend


@torch.library.custom_op("torchtitan::all_to_all", mutates_args=())
def all_to_all(rows: Tensor, group_name: str) -> Tensor:
    """Send each row to the rank of its index; return the row received from each rank."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=process_group(group_name))
    return received


@all_to_all.register_fake
def _(rows: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(rows)


def _save_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _differentiate_exchange(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return all_to_all(gradient.contiguous(), ctx.group_name), None


all_to_all.register_autograd(_differentiate_exchange, setup_context=_save_group)
KEPT_OPERATORS.add(torch.ops.torchtitan.all_to_all.default)


def apply(model: nn.Module, group: ProcessGroup, rotation: Rotation, balancing: Balancing) -> int:
    """Make all attention modules of `model` span the ranks of `group`; return their number."""
    assert group.size() > 1, "one rank has the whole sequence"
    name = group.group_name

    def core(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        exchange = (name, rotation, balancing)
        out: Tensor = context_attention(q, k, v, documents, *exchange, window, sinks)[0]
        return out

    modules = [module for module in model.modules() if isinstance(module, SelfAttention)]
    assert modules, "a model attends by SelfAttention, or its sequences cannot be split"
    one_window = len({module.window for module in modules}) == 1
    assert one_window or balancing != "documents", "the work of layers differs, and so would parts"
    for module in modules:
        module.core = exchanging_heads(module.core, group) if rotation == "ulysses" else core
    return len(modules)


def shard(batch: Batch, rank: int, size: int, balancing: Balancing, window: int = 0) -> Batch:
    """Return one rank's part of the sequences.

    Args:
        window: number of most recent tokens that a token attends to; 0: all.
    """
    cut = Cut(size, balancing)
    if size == 1 or balancing != "documents":
        return batch if size == 1 else batch.shard(partial(cut.part, rank=rank))
    rows = cut.rows(batch.context()["documents"], window)
    positions = torch.stack([row.positions(rank) for row in rows]).to(batch.inputs.device)
    return batch.shard(partial(_at, positions))


def _at(positions: Tensor, whole: Tensor) -> Tensor:
    """Return the values at other positions (B, S) of each row of `whole` (B, whole sequence)."""
    return whole[torch.arange(len(whole), device=whole.device)[:, None], positions]


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


@torch.library.custom_op("torchtitan::context_attention", mutates_args=())
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    group_name: str,
    rotation: str,
    balancing: str,
    window: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of this rank's queries to the keys of all ranks of a group.

    It is an operator so that compiled blocks can contain it and recomputation can skip it.

    Args:
        q: (B, H, S, E).
        k, v: (B, K, S, E); each serves H/K query heads.
        documents: (B, whole sequence) int64, the document of each token, on the CPU; None: a
            single document.
        group_name: name of the process group.
        rotation: a key of `ROTATIONS`.
        balancing: the partitioning used by `shard`.
        window: number of most recent tokens that a token attends to; 0: all.
        sinks: (H,), as in `causal_attention`.

    Returns:
        The output (B, H, S, E), and the log-sum-exp of the scores (B, H, S) in fp32.
    """
    group = process_group(group_name)
    rank, cut = group.rank(), Cut(group.size(), balancing)
    fetch, _ = ROTATIONS[rotation]
    out = torch.zeros_like(q, dtype=wide(q))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide(q))
    rows = cut.masked(q, documents, window)
    for owner, kv in fetch(torch.stack((k, v)), group):
        keys, values = kv
        for each in segments(rows, rank, owner, window) if rows else ():
            _merge(out, lse, *segments_forward(q, keys, values, each))
        tile = None if rows else cut.tile(rank, owner, q.shape[2])
        if tile is not None:
            own, (keys, values) = tile.queries, kv[..., tile.keys, :]
            part = attention_forward(q[:, :, own], keys, values, causal=tile.causal, bias=None)
            _merge(out[:, :, own], lse[:, :, own], *part)
    out, lse = add_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add attention to further keys in place. Each query sees some of the first."""
    total = torch.logaddexp(lse, part_lse)
    out *= (lse - total).exp()[..., None]
    out += (part_lse - total).exp()[..., None] * part
    lse.copy_(total)


@context_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide(q))


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
    window: int,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of q, and of k and v as one tensor (2, B, K, S, E).

    Keys and values are exchanged again, since keeping all ranks' would cost the memory that
    splitting the sequence saved. Gradients are sent and summed in fp32.
    """
    group = process_group(group_name)
    rank, cut = group.rank(), Cut(group.size(), balancing)
    fetch, bring_back = ROTATIONS[rotation]
    grad_q = torch.zeros_like(q, dtype=wide(q))
    rows = cut.masked(q, documents, window)

    def gradients() -> Owned:
        for owner, kv in fetch(torch.stack((k, v)), group):
            grad_kv, (keys, values) = torch.zeros_like(kv, dtype=wide(kv)), kv
            for each in segments(rows, rank, owner, window) if rows else ():
                of_q, of_k, of_v = segments_backward(grad_out, q, keys, values, out, lse, each)
                grad_q.add_(of_q)
                grad_kv[0] += of_k
                grad_kv[1] += of_v
            tile = None if rows else cut.tile(rank, owner, q.shape[2])
            if tile is not None:
                own, columns, causal = tile
                keys, values = kv[..., columns, :]
                of_q, of_k, of_v = attention_backward(
                    grad_out[:, :, own],
                    q[:, :, own],
                    keys,
                    values,
                    out[:, :, own],
                    lse[:, :, own],
                    causal=causal,
                    bias=None,
                )
                grad_q[:, :, own] += of_q
                grad_kv[0, :, :, columns] = of_k
                grad_kv[1, :, :, columns] = of_v
            yield owner, grad_kv

    grad_kv = bring_back(gradients(), group)
    return grad_q.to(q.dtype), grad_kv.to(k.dtype)


@context_attention_backward.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), k.new_empty(2, *k.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.group_name, ctx.rotation, ctx.balancing, ctx.window, sinks = inputs
    ctx.save_for_backward(*tensors, *output, sinks)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, sinks = ctx.saved_tensors
    grad_q, grad_kv = context_attention_backward(
        grad_out, *tensors, ctx.group_name, ctx.rotation, ctx.balancing, ctx.window
    )
    of_sinks = gradient_of_sinks(grad_out, tensors[-2], tensors[-1], sinks)
    return grad_q, *grad_kv.unbind(), None, None, None, None, None, of_sinks


context_attention.register_autograd(_differentiate, setup_context=_save)
