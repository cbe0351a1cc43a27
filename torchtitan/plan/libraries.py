"""Memory that libraries take on a device, in addition to the tensors of a step.

Outside of torch's allocator there are:

- CUDA's context, with the kernels of torch and its libraries.
- Buffers of NCCL. Each process group that sends has a communicator. An all-reduce takes 544 MB on
  A100 with NVLink among 2 ranks, and 688 MB among more, which further nodes do not change
  (NVIDIA/nccl#964, #986). Two ranks of a node that exchange messages have buffers for that in
  addition: an all-to-all among 8 H100 takes 3.28 GB (NVIDIA/nccl#1685).
- The symmetric memory of asynchronous tensor parallelism, as large as the largest shard that is
  gathered, or two of the shards that are reduced (`torch.distributed._symmetric_memory`).

Inside of it are cuBLAS's workspaces, one for each thread that computes products: that of the
forward and that of the backward (torch's CublasHandlePool.cpp).
"""

from collections.abc import Sequence
from typing import Final

from torchtitan.comm import Operation
from torchtitan.device import GIB
from torchtitan.job import JobConfig
from torchtitan.plan.expansion import RankStep
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.link_traffic import messages_of

PAIR_GIB: Final = 3.28e9 / 7 / GIB
"""Memory of NCCL for the messages of two ranks of a node."""
THREADS: Final = 2
"""Threads that compute products."""
WORKSPACE: Final = 32 * 1024**2
SMALL_WORKSPACE: Final = 8320 * 1024
"""Bytes of a workspace of cuBLAS: on Hopper and later, and before."""


def outside(
    job: JobConfig, ranks: int, rank: int, step: RankStep, hardware: Hardware
) -> dict[str, float]:
    """Return the GiB outside of torch's allocator on the device of `rank`, by their use."""
    found = {"context and kernels": hardware.outside_allocator_gib}
    if hardware.device_type == "cpu":
        return found
    members, axes, sent = step.source.members, step.source.axes, {*messages_of(step)}
    # Tokens and losses are summed, and steps agreed on, outside of the recording.
    used = {each.group for each in sent} | {
        name for name in members if axes[name] == "loss" or len(members[name]) == ranks
    }
    if count := sum(len(members[name]) > 1 for name in used):
        pairs = {(each.group, each.operation) for each in sent}
        near = (_near(rank, members[group], how, hardware) for group, how in pairs)
        found["communicators"] = count * hardware.communicator_gib + sum(near) * PAIR_GIB
    if job.parallelism.enable_async_tensor_parallel:
        shards = (
            each.bytes * (2 if each.operation == "reduce_scatter" else 1) / len(members[each.group])
            for each in sent
            if axes[each.group] == "tp"
        )
        found["symmetric memory"] = max(shards, default=0.0) / GIB
    return found


def workspaces(hardware: Hardware | None) -> list[int]:
    """Return the sizes of cuBLAS's workspaces."""
    is_old = hardware is not None and hardware.peaks.float8 is None
    return [SMALL_WORKSPACE if is_old else WORKSPACE] * THREADS


def _near(rank: int, members: Sequence[int], operation: Operation, hardware: Hardware) -> int:
    """Return the number of ranks in the same node with which a rank exchanges messages."""
    if operation == "send":
        at = members.index(rank)
        members = [members[at - 1], members[(at + 1) % len(members)]]
    elif operation != "all_to_all":
        return 0
    return sum(
        each // hardware.ranks_per_node == rank // hardware.ranks_per_node
        for each in {*members} - {rank}
    )
