"""Limits of any run: on numbers, before other rules loop up to them; on samples; on a CPU."""

import math
from collections.abc import Iterator

import torch

from torchtitan.checks.model import model_of
from torchtitan.config import PlannedWorld, Problem
from torchtitan.device import GIB, cpu_has_bfloat16
from torchtitan.job import JobConfig
from torchtitan.models.settings import MAX_LAYERS, MAX_SIZE

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
    sizes = {f"model.{key}": MAX_SIZE for key in job.model.sizes()}
    for key, limit in (MOST | sizes | {"model.n_layers": MAX_LAYERS}).items():
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
