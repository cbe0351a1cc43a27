"""Expert parallelism: ranks have different experts, and tokens travel to theirs (GShard; Lepikhin
et al., 2020, arXiv:2006.16668).

Of the ranks that share parameters, the axis `fsdp`, each `ep` neighbors have all experts together,
an equal number each, and share everything else as before. The rows of a microbatch, K for each
token, are sent to the ranks of their experts, computed there, and sent back:

    counts   rows for each expert, by all-to-all; the host waits for them, once in a layer
    there    rows and their scores, by all-to-alls of unequal sizes
    here     the results, by the opposite one

Every row is computed, however uneven the choice: memory and time follow the busiest rank. The
matrices of an expert have the gradient of all rows of the `ep` ranks, so it remains to sum over the
axis `efsdp`, whose ranks have the same experts, and which FSDP shards further.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.models.experts import Compute, Experts, inverse, permute
from torchtitan.optim.parameters import local
from torchtitan.parallel.activation_checkpoint import ALWAYS_KEPT_OPERATORS
from torchtitan.parallel.tensor import SplitExperts
from torchtitan.torch_private.distributed import process_group


def apply(part: nn.Module, mesh: DeviceMesh) -> None:
    """Place the experts of `part`, which have no values, on `mesh` (`World.expert_mesh`)."""
    from torch.distributed.tensor import Shard, distribute_tensor

    placed = mesh["ep", "tp"] if mesh["tp"].size() > 1 else mesh["ep"]
    for module in part.modules():
        if isinstance(module, Experts):
            for name, parameter in list(module.named_parameters(recurse=False)):
                placements = [Shard(0), Shard(module.SPLIT_DIM[name])][: placed.ndim]
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                distributed = distribute_tensor(whole, placed, placements, src_data_rank=None)
                module.register_parameter(name, nn.Parameter(distributed))
            if not isinstance(module, SplitExperts):
                module.__class__ = PlacedExperts
            group = mesh.get_group("ep")
            module.exchange = _RowExchange(group, len(module.w1) // group.size())


class PlacedExperts(Experts):
    """Experts of which this rank has some."""

    def forward(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        return self.mix(x, scores, chosen, *map(local, self.weights))


class _RowExchange:
    """Computes rows on the ranks of a group, each of which has some of the experts."""

    def __init__(self, group: dist.ProcessGroup, own: int) -> None:
        """`own`: number of experts of each rank."""
        self.group_name, self.ranks, self.own = group.group_name, group.size(), own

    def __call__(self, rows: Tensor, score: Tensor, expert: Tensor, compute: Compute) -> Tensor:
        by_expert, sent, received = exchange_counts(expert, self.own, self.group_name)
        arriving = rows_arriving(received, rows)
        there = (sent, received, arriving, self.group_name)
        arrived = exchange_rows(rows, *there)  # (M, D)
        scores = exchange_rows(score[:, None], *there)[:, 0]
        # By rank, then by expert; a stable sort makes it by expert, then by rank.
        numbers = torch.arange(self.own, device=rows.device, dtype=expert.dtype).repeat(self.ranks)
        numbers = numbers.repeat_interleave(by_expert, output_size=arriving)
        mine, order = numbers.sort(stable=True)
        out = compute(permute(arrived, order), permute(scores, order), mine)
        out = permute(out, inverse(order))
        result: Tensor = exchange_rows(out, received, sent, len(rows), self.group_name)
        return result


def rows_arriving(received: Tensor, rows: Tensor) -> int:
    """Return the number of rows that arrive at this rank; `rows` are those that leave it.

    A plan replaces it, since its tensors have no values.
    """
    return int(received.sum())


@torch.library.custom_op("torchtitan::exchange_counts", mutates_args=())
def exchange_counts(expert: Tensor, own: int, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tell each rank how many rows it gets for each of its experts; waits for the device.

    Args:
        expert: (N,) int, sorted, the expert of each row.
        own: number of experts of each of the n ranks.

    Returns:
        Rows for this rank's experts, those from the first rank first (n own,) int64; and on the
        CPU the rows that are sent to each rank, and received from each (n,) int64.
    """
    group = process_group(group_name)
    numbers = torch.arange(own * group.size(), device=expert.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, numbers, right=True)
    leaving = ends.diff(prepend=ends.new_zeros(1))
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    sent, received = torch.stack((leaving, arriving)).view(2, -1, own).sum(2).cpu()
    return arriving, sent.clone(), received.clone()


@exchange_counts.register_fake
def _(expert: Tensor, own: int, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    ranks = process_group(group_name).size()
    sent, received = (torch.empty(ranks, dtype=torch.int64, device="cpu") for _ in range(2))
    return expert.new_empty(ranks * own, dtype=torch.int64), sent, received


@torch.library.custom_op("torchtitan::exchange_rows", mutates_args=())
def exchange_rows(
    rows: Tensor, sent: Tensor, received: Tensor, arriving: int, group_name: str
) -> Tensor:
    """Send each rank consecutive rows; return those received, from the first rank first.

    Args:
        rows: (N, D).
        sent, received: (ranks,) int64 on the CPU, number of rows to and from each.
        arriving: M, sum of `received`.

    Returns:
        (M, D).
    """
    arrived = rows.new_empty(arriving, rows.shape[1])
    sizes = received.tolist(), sent.tolist()
    dist.all_to_all_single(arrived, rows.contiguous(), *sizes, group=process_group(group_name))
    return arrived


@exchange_rows.register_fake
def _(rows: Tensor, sent: Tensor, received: Tensor, arriving: int, group_name: str) -> Tensor:
    return rows.new_empty(arriving, rows.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, str], output: Tensor) -> None:
    rows, sent, received, _, ctx.group_name = inputs
    ctx.leaving = rows.shape[0]
    ctx.save_for_backward(sent, received)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    sent, received = ctx.saved_tensors
    back = exchange_rows(gradient, received, sent, ctx.leaving, ctx.group_name)
    return back, None, None, None, None


exchange_rows.register_autograd(_differentiate, setup_context=_save)
ALWAYS_KEPT_OPERATORS.add(torch.ops.torchtitan.exchange_counts.default)
