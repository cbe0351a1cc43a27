"""Whether degrees, sequences and batches come out even on the ranks there are."""

import math
from collections.abc import Iterator

from torchtitan.config import Problem
from torchtitan.data import check_data
from torchtitan.job import JobConfig

DEGREES = tuple(
    f"parallelism.{kind}_degree"
    for kind in (
        "data_parallel_replicate",
        "data_parallel_shard",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
    )
)


SHARD = "parallelism.data_parallel_shard_degree"


GROUPS = ("fault_tolerance.enable", "fault_tolerance.group_size")


def smallest_world(job: JobConfig) -> int:
    """The least number of ranks that the degrees of a recipe ask for."""
    p = job.parallelism
    shard = max(p.data_parallel_shard_degree, 1)
    one = p.pipeline_parallel_degree * p.context_parallel_degree * p.tensor_parallel_degree
    return one * p.data_parallel_replicate_degree * shard


def problems_of_degrees(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    p = job.parallelism
    if p.data_parallel_shard_degree == 0:
        yield Problem(SHARD, "wanted -1 (all ranks that are left) or an integer >= 1")
        return
    needed = smallest_world(job)
    if world_size is None or world_size == needed:
        return
    ranks = f"the {world_size} rank{'s' * (world_size > 1)} of this run"
    others = needed // max(p.data_parallel_shard_degree, 1)
    factors = {key: job.flat()[key] for key in DEGREES}
    product = " x ".join(
        f"{key.split('.')[1]} {n}" for key, n in factors.items() if n not in (1, -1)
    )
    if p.data_parallel_shard_degree != -1:
        hint = f"; use {world_size // others} or -1" if world_size % others == 0 else ""
        message = (
            f"the degrees multiply to {needed} ({product or 'all are 1'}), not to {ranks}{hint}"
        )
        yield Problem(SHARD, message, DEGREES)
    elif world_size % others:
        message = (
            f"the other degrees multiply to {others} ({product}), which does not divide {ranks}"
        )
        yield Problem(SHARD, message, DEGREES)


def problems_of_sequences(job: JobConfig) -> Iterator[Problem]:
    p, length = job.parallelism, job.training.seq_len
    factors = {}
    if p.tensor_parallel_degree > 1 and not p.disable_sequence_parallel:
        factors["tensor_parallel_degree"] = p.tensor_parallel_degree
    if p.context_parallel_degree > 1:
        factors["context_parallel_degree"] = p.context_parallel_degree
        if p.context_parallel_load_balancer == "headtail":
            factors["2 (a part from the head and one from the tail each)"] = 2
    parts = math.prod(factors.values())
    if length % parts:
        why = " x ".join(f"{key} {n}" if key[0] != "2" else key for key, n in factors.items())
        near = max(round(length / parts), 1) * parts
        message = f"it is not a multiple of {parts} ({why}); use {near}"
        yield Problem("training.seq_len", message, DEGREES)


def problems_of_batches(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    t = job.training
    if t.global_batch_size == 0:
        yield Problem("training.global_batch_size", "wanted -1 or an integer >= 1")
        return
    degrees = job.degrees(world_size or smallest_world(job))
    if (ranks := job.data_ranks(degrees)) < 1:
        return  # said of the degrees already, or of the groups
    once = t.local_batch_size * ranks
    rests_on = ("training.local_batch_size", "training.global_batch_size", *DEGREES, *GROUPS)
    if job.global_batch(degrees) % once:
        near = max(round(t.global_batch_size / once), 1) * once
        message = (
            f"it is not a multiple of local_batch_size {t.local_batch_size} x {ranks} "
            f"data-parallel rank{'s' * (ranks > 1)} = {once}; use {near}"
        )
        yield Problem("training.global_batch_size", message, rests_on)
        return
    sizes = {
        "local_batch_size": t.local_batch_size,
        "accumulation": job.accumulation(degrees),
        "ranks": ranks,
    }
    for key, message in check_data(job.data, **sizes):
        yield Problem(key, message, ("data", *rests_on))
    if job.validation.enable:
        for key, message in job.validation.mistakes(job.data):
            yield Problem(key, message)


def divisors(count: int) -> str:
    found = [str(n) for n in range(1, count + 1) if count % n == 0]
    return " or ".join(filter(None, [", ".join(found[:-1]), found[-1]]))
