"""Context parallelism by heads: each rank attends with some of the heads, over whole sequences.

An all-to-all turns queries, keys and values of all heads and a part of the sequence into those of
some heads and the whole sequence, and another one turns the output back (DeepSpeed-Ulysses, Jacobs
et al., 2023, arXiv:2309.14509). Between them, attention is computed as on one device.

Shapes: n ranks, B batch, S this rank's part of the sequence, H query heads, K key/value heads, E
head dim.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.models.attention import Core
from torchtitan.parallel.activation_checkpoint import KEPT_OPERATORS
from torchtitan.torch_private.distributed import process_group


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


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return all_to_all(gradient.contiguous(), ctx.group_name), None


all_to_all.register_autograd(_differentiate, setup_context=_save)
KEPT_OPERATORS.add(torch.ops.torchtitan.all_to_all.default)
