"""Limits of any run: on numbers, before other rules loop up to them; on samples; on memory."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchtitan.checks.model import model_of
from torchtitan.config import PlannedWorld, Problem
from torchtitan.device import GIB, Device, cpu_has_bfloat16, pick, smallest
from torchtitan.job import JobConfig
from torchtitan.models.settings import most_of
from torchtitan.optim import name_parameters, state_bytes

MOST = {
    "training.seq_len": 2**31,
    "training.local_batch_size": 2**20,
    "training.global_batch_size": 2**31,
    "data.lanes": 2**31,
    "data.num_workers": 2**10,
    "data.prefetch_factor": 2**20,
    "data.document_bytes": 2**40,
    "parallelism.data_parallel_replicate_degree": 2**20,
    "parallelism.data_parallel_shard_degree": 2**20,
    "parallelism.tensor_parallel_degree": 2**20,
    "parallelism.pipeline_parallel_degree": 2**12,
    "parallelism.context_parallel_degree": 2**20,
    "fault_tolerance.group_size": 2**20,
    "validation.steps": 2**40,
    "training.steps": 2**40,
}
ANY_MACHINE = 64 * 1024
"""GiB; more than a process has on any machine."""


def numbers(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that no number is beyond that of any run."""
    values = job.flat()
    sizes = {f"model.{key}": most_of(key) for key in job.model.sizes()}
    for key, limit in (MOST | sizes).items():
        value = values.get(key)
        if isinstance(value, int) and value > limit:
            yield Problem(key, f"wanted at most {limit:,}")


def samples(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the inputs of blocks, which every recomputation keeps, fit in any machine."""
    model, degrees = model_of(job), job.degrees(world.ranks or job.parallelism.least_ranks)
    if model is None or min(degrees) < 1:
        return
    is_in_pipeline, batch = degrees.pp > 1, job.local_batch(degrees)
    sequences = job.parallelism.pipeline_parallel_microbatch_size if is_in_pipeline else batch
    elements = sequences * math.prod(model.spec.shapes(model.args, job.training.seq_len).hidden)
    itemsize = getattr(torch, job.training.mixed_precision_param).itemsize
    blocks = max(1, getattr(model.args, "n_layers", 1) / degrees.pp)
    held = blocks * elements * itemsize / (degrees.cp * degrees.tp) / GIB
    if held > ANY_MACHINE:
        yield Problem(
            "training.seq_len",
            f"with training.local_batch_size {batch:,} the samples of a rank take {held:,.0f} "
            "GiB; no machine has that much memory",
            ("training.local_batch_size", "model"),
        )


def bfloat16(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Note that a CPU is slow in bfloat16: a default by device would make it train another run."""
    if (
        job.training.mixed_precision_param == "bfloat16"
        and world.device_type == "cpu"
        and not cpu_has_bfloat16()
    ):
        message = (
            "this CPU has no bfloat16 arithmetic, and emulates it slowly; use float32 to train "
            "here, which changes the run's rounding on every device"
        )
        yield Problem("training.mixed_precision_param", message, ("training",), "note")


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

    Of N parameters a rank holds N / (pp x fsdp x tp), with as many gradients, and the states of its
    optimizer (Rajbhandari et al., 2020, arXiv:1910.02054). This takes milliseconds, so every launch
    is checked. What depends on the samples is left to `torchtitan plan`, which takes seconds.

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
