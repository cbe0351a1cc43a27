"""Who this process is among the others: rank, device, one mesh with every axis, reductions.

Every axis always exists, with size 1 when unused, so nothing above asks whether it is there:

    pp            pipeline stages
    dp_replicate  copies of the model (DDP; HSDP together with dp_shard)
    dp_shard      parts of the model (FSDP)
    cp            parts of the sequence
    tp            parts of a matrix

`data` joins the axes whose ranks read different samples, `batch` those whose ranks hold different
targets.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan import torch_private
from torchtitan.config import Config
from torchtitan.device import Device, pick

JOINED_AXES = {
    "data": ("dp_replicate", "dp_shard"),
    "batch": ("dp_replicate", "dp_shard", "cp"),
}
# Coordination of saves: as slow as a shared file system can be.
PATIENCE = timedelta(hours=2)


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


class CommConfig(Config):
    """Settings of the process groups."""

    init_timeout_seconds: int = Field(
        300, ge=1, description="Limit for a collective until the end of the first step."
    )
    train_timeout_seconds: int = Field(
        100, ge=1, description="Limit for a collective after the first step."
    )


class Launch(NamedTuple):
    """What the launcher says of this process, from the environment variables of torchrun."""

    rank: int
    size: int
    local_rank: int
    by_launcher: bool

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
        return cls(rank, size, int(os.environ.get("LOCAL_RANK", rank)), by_launcher=True)


@dataclass(frozen=True)
class World:
    """The processes of a run as one of them sees them; made by `open_world`."""

    rank: int
    size: int
    device: Device
    degrees: Degrees
    mesh: DeviceMesh
    joined: dict[str, DeviceMesh]
    patient: dist.ProcessGroup
    comm: CommConfig

    def axis(self, name: str) -> DeviceMesh:
        """The mesh along one axis, by its name or the name of a joined axis."""
        return self.joined[name] if name in self.joined else self.mesh[name]

    @property
    def data_rank(self) -> int:
        """Which share of every batch of samples this rank reads."""
        return int(self.axis("data").get_local_rank())

    def sum(self, values: Tensor, over: Literal["batch"]) -> Tensor:
        """Sum over an axis, in place; the same on all its ranks."""
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self.axis(over).get_group())
        return values

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over all ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def gather(self, value: Any) -> list[Any]:
        """A small picklable value of every rank, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.patient)
        return values

    def share(self, value: Any) -> Any:
        """Rank 0's small picklable value, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.patient)
        return values[0]

    def after_first_step(self) -> None:
        """From now on a rank that does not answer is found sooner."""
        timeout = timedelta(seconds=self.comm.train_timeout_seconds)
        for name in (*Degrees._fields, *JOINED_AXES):
            torch_private.set_timeout(self.axis(name).get_group(), timeout)
        torch_private.set_timeout(None, timeout)


@contextmanager
def open_world(degrees: Degrees, comm: CommConfig, device: Device | None = None) -> Iterator[World]:
    """Join the other processes and build the mesh; leave them at the end.

    Where a process group exists already (a test made it) it is used and left as it is.
    """
    launch = Launch.read()
    device = device or pick(launch.local_rank)
    device.make_current()
    owner = not dist.is_initialized()
    if owner:
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{device.backend}"
        timeout = timedelta(seconds=comm.init_timeout_seconds)
        if launch.by_launcher:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    try:
        names = Degrees._fields
        mesh = init_device_mesh(device.type, tuple(degrees), mesh_dim_names=names)
        yield World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            device=device,
            degrees=degrees,
            mesh=mesh,
            joined={
                name: torch_private.join(mesh, axes, name) for name, axes in JOINED_AXES.items()
            },
            patient=dist.new_group(backend="gloo", timeout=PATIENCE),
            comm=comm,
        )
    finally:
        if owner:
            dist.destroy_process_group()
