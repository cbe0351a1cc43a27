"""Check that the model and optimizer states of a machine's ranks fit in its memory.

Of N parameters a rank holds N / (pp x fsdp x tp), with as many gradients, and the states of its
optimizer (Rajbhandari et al., 2020, arXiv:1910.02054). This takes milliseconds, so every launch is
checked. All that depends on the samples is left to a plan (`torchtitan plan`), which takes
seconds.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchtitan.checks.model import model_of
from torchtitan.config import Problem
from torchtitan.device import GIB, Device, pick, smallest
from torchtitan.job import JobConfig
from torchtitan.optim import name_parameters, state_bytes


class ModelStates(NamedTuple):
    """GiB of the parameters, gradients and optimizer states of the average rank."""

    device: float
    host: float
    """Offloaded states in host memory."""


class MemoryPool(NamedTuple):
    """Memory pool of this machine, and the ranks that share it."""

    device: Device
    ranks: int
    holds: float
    """GiB of all its ranks."""

    @property
    def subject(self) -> str:
        """Subject of a sentence on `holds`."""
        return f"{self.ranks} ranks hold" if self.ranks > 1 else "a rank holds"

    def __str__(self) -> str:
        return "the host" if self.device.type == "cpu" else self.device.name


def pools(device: Device, local: int, on_device: float, on_host: float) -> list[MemoryPool]:
    """Return each memory pool used by `local` ranks, given the GiB of each."""
    if device.type == "cpu":
        return [MemoryPool(device, local, local * (on_device + on_host))]
    return [MemoryPool(device, 1, on_device), MemoryPool(Device("cpu"), local, local * on_host)]


def model_states(job: JobConfig, ranks: int) -> ModelStates:
    """Return what the average rank of a valid recipe holds at an update."""
    model, degrees = model_of(job), job.degrees(ranks)
    assert model is not None, "the recipe was checked"
    itemsize = getattr(torch, job.training.dtype).itemsize
    named = name_parameters([model.empty()], model.spec.role)
    size = itemsize * sum(each.shape.numel() for each in named)
    gradients = 0 if job.optimizer.early_step_in_backward else size
    share = 1 / (degrees.pp * degrees.fsdp * degrees.tp) / GIB
    held = share * (size + gradients + state_bytes(job.optimizer, named, itemsize))
    return ModelStates(0.0, held) if job.training.enable_cpu_offload else ModelStates(held, 0.0)


def problems_of_memory(
    job: JobConfig, ranks: int, local_ranks: int, device_type: str
) -> Iterator[Problem]:
    """Find that ranks cannot fit in the memory of this machine, even if it were all free.

    Args:
        local_ranks: number of ranks that share this machine.
    """
    if device_type != pick().type:
        return
    held, local = model_states(job, ranks), min(local_ranks, ranks)
    for pool in pools(smallest(local), local, held.device, held.host):
        if pool.holds > (limit := pool.device.memory_limit()):
            yield Problem(
                "model.flavor",
                f"{pool.subject} at least {pool.holds:,.1f} GiB, and {pool} has {limit:,.1f}; "
                "torchtitan plan lists changes after which a recipe fits",
            )
