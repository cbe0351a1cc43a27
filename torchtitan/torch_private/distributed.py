"""Process groups, collectives, and parts of torch's checkpoint, elastic agent and streams."""

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def set_timeout(group: ProcessGroup | None, timeout: timedelta) -> None:
    """Set the time limit of collectives of `group` (None: the default group)."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)


def timeout_of(group: ProcessGroup, device_type: str) -> timedelta:
    """Return the time limit of collectives of `group`."""
    options = group._get_backend(torch.device(device_type)).options
    timeout: timedelta = options._timeout if options else dist.default_pg_timeout
    return timeout


def process_group(name: str) -> ProcessGroup:
    """Return the process group called `name`, as operators take names, not objects."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def all_gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Gather `tensor` of every rank of `group`: (ranks, *shape)."""
    whole = tensor.new_empty(group.size(), *tensor.shape)
    all_gather_into(whole.flatten(0, 1), tensor, group)
    return whole


def reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's row of the sum of `tensor` (ranks, *shape) over `group`."""
    own = torch.empty_like(tensor[0])
    reduce_scatter_into(own, tensor.flatten(0, 1), group)
    return own


def max_over(tensor: Tensor, group_name: str) -> Tensor:
    """Return the elementwise maximum over the ranks of a group; a compiled graph can contain it."""
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    largest: Tensor = wait_tensor(  # type: ignore[no-untyped-call]
        all_reduce(tensor.contiguous(), "max", group_name)  # type: ignore[arg-type]
    )
    return largest


def columns_to_rows(tensor: Tensor, group: ProcessGroup, widths: Sequence[int]) -> Tensor:
    """Redistribute a matrix from sharded columns to sharded rows.

    Args:
        tensor: (rows, this rank's columns); all ranks have the same rows, and columns in order.
        widths: number of columns of each rank.

    Returns:
        (this rank's share of the rows, columns of all ranks)
    """
    assert tensor.shape[1] == widths[group.rank()], f"{tensor.shape[1]} columns of {widths}"
    rows = [len(part) for part in tensor.tensor_split(len(widths))]
    mine = rows[group.rank()]
    got = tensor.new_empty(mine * sum(widths))
    sent = [count * tensor.shape[1] for count in rows]
    found = [mine * width for width in widths]
    dist.all_to_all_single(got, tensor.contiguous().view(-1), found, sent, group=group)
    pieces = zip(torch.split(got, found), widths, strict=True)
    return torch.cat([piece.view(mine, width) for piece, width in pieces], dim=1)


def all_gather_into(whole: Tensor, part: Tensor, group: ProcessGroup) -> None:
    """Fill `whole` with `part` of every rank. Torch 2.13 renames the collective."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)


def reduce_scatter_into(part: Tensor, whole: Tensor, group: ProcessGroup) -> None:
    """Fill `part` with this rank's rows of the sum of `whole` over all ranks."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, whole, group=group)


def flight_records(device_type: str) -> list[bytes]:
    """Return the data of torch's Flight Recorders, as pickles of plain values: the device's first.

    Gloo has a recorder and NCCL another; a process that trains on CUDA uses both.
    """
    from torch._C import _distributed_c10d as c10d

    names = ["_dump_fr_trace"] if device_type == "cpu" else ["_dump_nccl_trace", "_dump_fr_trace"]
    if missing := [name for name in names if not hasattr(c10d, name)]:
        raise RuntimeError(
            f"torch {torch.__version__} cannot tell what its Flight Recorder holds (it has no "
            f"{missing[0]}); use torch 2.11 to 2.13, or comm.trace_buf_size = 0"
        )
    return [getattr(c10d, name)() for name in names]


def group_members() -> dict[str, tuple[str, list[int]]]:
    """Return the purpose and the global ranks of each process group, by name."""
    from torch.distributed import get_process_group_ranks
    from torch.distributed.distributed_c10d import _world

    return {
        name: (group.group_desc, get_process_group_ranks(group))
        for group, name in _world.pg_names.items()
    }


def storage_info(file: str, offset: int, length: int) -> Any:
    """Build the location of `length` bytes of a file from `offset` on, as in `.metadata`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def forget_store(rendezvous: Any) -> None:
    """Make the ranks use a new store when they restart.

    The agents reuse theirs, which has the addresses of dead ranks, and may be on a dead node
    (https://github.com/pytorch/pytorch/issues/135712).
    """
    assert hasattr(rendezvous, "_bootstrap_store_info"), "another rendezvous than torch's own"
    rendezvous._bootstrap_store_info = None


def leave(rendezvous: Any) -> None:
    """Leave, so that the other nodes soon notice; torch's `shutdown` would end them too."""
    rendezvous._stop_heartbeats()


def read_stream(stream: IO[bytes]) -> Any:
    """Read the output of torch's `_streaming_save`: tensors and plain values, without running code.

    Raises:
        pickle.UnpicklingError: if there is anything else.
    """
    from torch.distributed._serialization import _streaming_load

    with warnings.catch_warnings():
        # It fills the tensors itself; their original bytes are never written to.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return _streaming_load(stream, weights_only=True)  # type: ignore[arg-type]
