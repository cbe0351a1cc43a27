"""The process's place in a distributed run: rank, device, a mesh with every axis, reductions.

Every axis always exists, with size 1 when unused, so callers need not check for it:

    pp            pipeline stages
    dp_replicate  copies of the model (DDP; HSDP together with dp_shard)
    dp_shard      parts of the model (FSDP)
    cp            parts of the sequence
    tp            parts of a matrix

Axes are also joined: the ranks of `data` read different samples; those of `fsdp` own different
shards of the parameters, which ranks with the same sequence can share as well as ranks with
different samples.

Process groups are created only for axes in use: all axes of size 1 have one group, of this rank
alone, and axes over the same ranks share a group.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config import Config, Context, Problem
from torchtitan.device import Device, pick
from torchtitan.torch_private.distributed import set_timeout

JOINED_AXES = {"data": ("dp_replicate", "dp_shard"), "fsdp": ("dp_shard", "cp")}
PARAMETER_AXES = ("pp", "dp_replicate", "fsdp", "tp")
# Coordination of saves can be as slow as a shared file system.
OBJECT_TIMEOUT = timedelta(hours=2)

Found = TypeVar("Found")


class Degrees(NamedTuple):
    """Sizes of the mesh axes, in mesh order (the innermost, last, has the nearest ranks)."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def data(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks that share the parameters."""
        return self.dp_shard * self.cp


class CommConfig(Config):
    """Settings of the process groups."""

    init_timeout_seconds: int = Field(300, ge=1)
    """Timeout of collectives until the end of the first step."""
    train_timeout_seconds: int = Field(100, ge=1)
    """Timeout of collectives after the first step."""
    trace_buf_size: int = Field(2000, ge=0)
    """Number of collectives that torch's Flight Recorder keeps on each rank; 0: off. With a single
    rank, none are recorded."""
    save_traces_folder: str = "comm_traces"
    """Folder of step records, and of the traces of failed runs, inside job.dump_folder."""
    save_traces_file_prefix: str = "rank_"
    """Prefix of the file names of traces; the rank follows."""
    debug_level: Literal["off", "info", "detail"] | None = None
    """Level of torch's checks and logs of collectives (default: the environment variable
    TORCH_DISTRIBUTED_DEBUG). info: log more; detail: before each collective, all ranks compare
    operation, shapes and dtypes, and fail if they differ. With detail, each collective is several
    times slower, and init_timeout_seconds applies to the whole run."""

    def problems(self, context: Context) -> Iterator[Problem]:
        prefix = self.save_traces_file_prefix
        if "/" in prefix or prefix[-1:].isdigit():
            message = (
                "wanted the start of a file name, without / and not ending in a digit, as the "
                "rank follows it"
            )
            yield Problem("save_traces_file_prefix", message)


RANK_ROLE = "rank"
"""Role that our launcher gives to ranks; torch's agent writes `[rank0]:` before their output."""


class Launch(NamedTuple):
    """Rank, size and restarts of this process, from the environment variables of torchrun."""

    rank: int
    size: int
    local_rank: int
    by_launcher: bool
    by_agent: bool = False
    """Whether an elastic agent started the process; it restarts the run on any non-zero status."""
    restart: int = 0
    """Number of restarts by the agent so far, at most `restarts`."""
    restarts: int = 0
    local_size: int = 1
    """Number of ranks on this machine."""
    is_labeled: bool = False
    """Whether the launcher writes the rank before each line of output."""

    @property
    def neighbors(self) -> range:
        """Ranks on this machine, with this one."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)

    @classmethod
    def read(cls) -> "Launch":
        """Read the environment; without a launcher this is the only process."""
        if "WORLD_SIZE" not in os.environ:
            return cls(rank=0, size=1, local_rank=0, by_launcher=False)
        if "RANK" not in os.environ:
            raise RuntimeError(
                "WORLD_SIZE is set but RANK is not: start the processes with torchrun, or unset it"
            )
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(
            rank,
            size,
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            by_launcher=True,
            by_agent="TORCHELASTIC_RUN_ID" in os.environ,
            restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            restarts=int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            is_labeled=os.environ.get("ROLE_NAME") == RANK_ROLE,
        )


@dataclass(frozen=True)
class World:
    """Processes of a run, as seen by one of them; created by `open_world`."""

    rank: int
    size: int
    device: Device
    degrees: Degrees
    mesh: DeviceMesh
    parameter_mesh: DeviceMesh
    """Mesh of the same ranks with dp_shard and cp as one axis, on which parameters are placed."""
    groups: "dict[str, dist.ProcessGroup]"
    """Process groups by the name of an axis or of joined axes; some names share a group."""
    slow_group: "dist.ProcessGroup"
    comm: CommConfig

    @property
    def data_rank(self) -> int:
        """Index of the share of every batch of samples that this rank reads."""
        return dist.get_rank(self.groups["data"])

    @property
    def is_first_of_data(self) -> bool:
        """Whether this is the first of the ranks that read the same samples."""
        return not any(dist.get_rank(self.groups[axis]) for axis in ("pp", "cp", "tp"))

    @property
    def stage_rank(self) -> int:
        """Rank in the pipeline."""
        return dist.get_rank(self.groups["pp"])

    @property
    def data_mesh(self) -> DeviceMesh:
        """Mesh of FSDP: (replicas, shards), or (shards) without replicas."""
        mesh, copied = self.parameter_mesh, self.degrees.dp_replicate > 1
        return mesh["dp_replicate", "fsdp"] if copied else mesh["fsdp"]

    def expert_mesh(self, degree: int) -> DeviceMesh:
        """Return a mesh of the same ranks for experts, of which `degree` neighbors have all.

        Its axes are those of `parameter_mesh`, with `fsdp` in two: the ranks of `efsdp` share the
        same experts, and those of `ep` have different ones.
        """
        degrees, shared = self.degrees, self.groups["fsdp"]
        sizes = {"efsdp": degrees.fsdp // degree, "ep": degree}
        shape = (degrees.pp, degrees.dp_replicate, *sizes.values(), degrees.tp)
        ranks = torch.arange(self.size).view(shape)
        mine = (ranks == self.rank).nonzero()[0].tolist()
        for axis, (name, size) in enumerate(sizes.items(), 2):
            where = tuple(slice(None) if n == axis else at for n, at in enumerate(mine))
            members = ranks[where].tolist()
            timeout = timedelta(seconds=self.comm.init_timeout_seconds)
            self.groups[name] = shared if size == degrees.fsdp else _group(members, timeout, name)
        axes = ("pp", "dp_replicate", *sizes, "tp")
        groups = [self.groups[axis] for axis in axes]
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=axes)

    def sum(self, values: Tensor, over: Literal["data", "dp_shard", "all"]) -> Tensor:
        """Sum over an axis, joined axes or all ranks, in place; equal on all of them."""
        group = None if over == "all" else self.groups[over]
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=group)
        return values

    def terms(self, values: Tensor) -> Tensor:
        """Return this rank's terms of a sum over all ranks, of values that ranks of tp share.

        They are zero except on the first of these ranks, but NaN stays NaN.
        """
        return values if dist.get_rank(self.groups["tp"]) == 0 else values * 0

    def max(self, values: Tensor) -> Tensor:
        """Take the elementwise maximum over all ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def table(self, values: Tensor) -> Tensor:
        """Gather the values (n,) of all ranks, in rank order, on every rank: (ranks, n)."""
        rows = values.new_zeros(self.size, len(values))
        rows[self.rank] = values
        dist.all_reduce(rows)
        return rows

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return which of the flags, as many on every rank, are set on any rank."""
        found = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.slow_group)
        return [bool(each) for each in found.tolist()]

    def gather_found(self, found: Sequence[Found]) -> list[Found]:
        """Gather what ranks have found, in rank order, on every rank; usually nothing.

        Where no rank has found anything, none receives more from more ranks.
        """
        if not self.any([bool(found)])[0]:
            return []
        return [each for of_rank in self.gather(list(found)) for each in of_rank]

    def gather(self, value: Any) -> list[Any]:
        """Gather a small picklable value of every rank, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.slow_group)
        return values

    def gather_object(self, value: Any) -> list[Any] | None:
        """Gather a picklable value of every rank, in rank order, on rank 0; None on the others."""
        values = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.slow_group)
        return values

    def scatter_object(self, values: Sequence[Any] | None) -> Any:
        """Scatter rank 0's picklable values, one to each rank; the other ranks pass None."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, list(values) if values else None, 0, group=self.slow_group)
        return mine[0]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Broadcast a small picklable value of one rank, the `source`, to every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=source, group=self.slow_group)
        return values[0]

    def meet(self, seconds: float) -> None:
        """Wait for the other ranks, but not for long: they may have failed elsewhere."""
        with suppress(RuntimeError):
            dist.monitored_barrier(self.slow_group, timedelta(seconds=seconds))

    def after_first_step(self) -> None:
        """Shorten timeouts, so that a rank that does not respond is detected sooner."""
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            return  # torch cannot change the timeout of a group that checks its collectives
        timeout = timedelta(seconds=self.comm.train_timeout_seconds)
        for group in {id(group): group for group in self.groups.values()}.values():
            set_timeout(group, timeout)
        set_timeout(None, timeout)


class Groups:
    """Process groups of a run: one for each distinct set of ranks, created on first use."""

    def __init__(self, degrees: Degrees, timeout: timedelta) -> None:
        self.degrees, self.timeout = degrees, timeout
        self.ranks = torch.arange(math.prod(degrees)).view(tuple(degrees))
        self.made: dict[tuple[str, ...], dist.ProcessGroup] = {}

    def over(self, axes: Sequence[str]) -> dist.ProcessGroup:
        """Return this rank's group along `axes`."""
        used = tuple(axis for axis in axes if getattr(self.degrees, axis) > 1)
        if used not in self.made:
            self.made[used] = self._make(used)
        return self.made[used]

    def _make(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        mine = (self.ranks == dist.get_rank()).nonzero()[0].tolist()
        where = tuple(
            slice(None) if axis in axes else at
            for axis, at in zip(Degrees._fields, mine, strict=True)
        )
        ranks = self.ranks[where].flatten().tolist()
        if len(ranks) == len(self.ranks.flatten()) > 1:
            everyone: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
            return everyone
        return _group(ranks, self.timeout, "_".join(axes) or "alone")

    def mesh(self, axes: Mapping[str, Sequence[str]], device_type: str) -> DeviceMesh:
        """Return a mesh of all ranks, each of whose axes joins neighbouring axes of the world."""
        sizes = [math.prod(getattr(self.degrees, axis) for axis in axes[name]) for name in axes]
        return DeviceMesh.from_group(
            [self.over(joined) for joined in axes.values()],
            device_type,
            mesh=self.ranks.view(sizes),
            mesh_dim_names=tuple(axes),
        )


def _group(ranks: list[int], timeout: timedelta, purpose: str) -> dist.ProcessGroup:
    """Create a group of some ranks, in which the others need not take part."""
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout=timeout, use_local_synchronization=True, group_desc=purpose
    )
    return group


def make_world(
    degrees: Degrees, comm: CommConfig, device: Device, slow_group: dist.ProcessGroup
) -> World:
    """Create the world of this process, whose default process group exists."""
    groups = Groups(degrees, timedelta(seconds=comm.init_timeout_seconds))
    own = {name: (name,) for name in Degrees._fields}
    parameters = {name: JOINED_AXES.get(name, (name,)) for name in PARAMETER_AXES}
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=device,
        degrees=degrees,
        mesh=groups.mesh(own, device.type),
        parameter_mesh=groups.mesh(parameters, device.type),
        groups={name: groups.over(axes) for name, axes in (own | JOINED_AXES).items()},
        slow_group=slow_group,
        comm=comm,
    )


@contextmanager
def open_world(degrees: Degrees, comm: CommConfig, device: Device | None = None) -> Iterator[World]:
    """Join the other processes and build the mesh; leave them on exit.

    An existing process group (as in a test) is used and not destroyed.
    """
    launch = Launch.read()
    device = device or pick(launch.local_rank)
    device.make_current()
    if comm.debug_level is not None:
        # Each group reads the level when it is created.
        level = getattr(dist.DebugLevel, comm.debug_level.upper())
        dist.set_debug_level(level)
    # In a group of gloo, a rank connects to all others, so it notices at once that one has died.
    # But it first reads what each tells each, 2 GB at 16,384 ranks. So many connect when they first
    # send, and notice one that has died before then only after five times the timeout.
    if launch.size > 256:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    owner = not dist.is_initialized()
    if owner:
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{device.backend}"
        timeout = timedelta(seconds=comm.init_timeout_seconds)
        if launch.by_launcher:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()
            dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    try:
        slow_group = dist.new_group(backend="gloo", timeout=OBJECT_TIMEOUT, group_desc="slow")
        yield make_world(degrees, comm, device, slow_group)
    finally:
        if owner:
            dist.destroy_process_group()
