"""Checks that degrees, sequences and batches are divisible by the number of ranks."""

import math
from collections.abc import Iterable, Iterator

from torchtitan.config import PlannedWorld, Problem, counted
from torchtitan.data.sizes import least_lanes
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.tasks import TASKS

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


BATCH = "training.global_batch_size"


SHARD = "parallelism.data_parallel_shard_degree"


GROUPS = ("fault_tolerance.enable", "fault_tolerance.group_size")


def degrees(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the product of the degrees is the number of ranks."""
    p, world_size = job.parallelism, world.ranks
    if p.data_parallel_shard_degree == 0:
        yield Problem(SHARD, "wanted -1 (all remaining ranks) or an integer >= 1")
        return
    needed = p.least_ranks
    if world_size is None or world_size == needed:
        return
    others = needed // p.least_shards
    is_free = p.data_parallel_shard_degree == -1
    if is_free and world_size % others == 0:
        return
    factors = {key: n for key in DEGREES if (n := job.flat()[key]) not in (1, -1)}
    product = " x ".join(f"{key.split('.')[1]} {n}" for key, n in factors.items()) or "all are 1"
    ranks = f"the {world_size} rank{'s' * (world_size > 1)} of this run"
    fits = world_size // needed * needed or needed if is_free else needed
    if world.is_here and world.local_ranks == world_size and not world.may_restart:
        several = f"a multiple of {others}" * (is_free and world_size > others) or str(needed)
        message = (
            f"this layout needs {several} process{'es' * (needed > 1)} ({product}), and this run "
            f"has {world_size}; start them: torchtitan train RECIPE --processes {fits}"
        )
        yield Problem(next(iter(factors), SHARD), message, DEGREES)
    elif is_free:
        message = f"this layout needs a multiple of {others} ranks ({product}), not {world_size}"
        yield Problem(next(iter(factors)), message, DEGREES)
    else:
        hint = f"; use {world_size // others} or -1" if world_size % others == 0 else ""
        message = f"the degrees multiply to {needed} ({product}), not to {ranks}{hint}"
        yield Problem(SHARD, message, DEGREES)


def sequences(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that a sequence is divisible by the ranks that share it."""
    p = job.parallelism
    if not TASKS[MODELS[job.model.name].task].splits_sequences:
        return  # reported by the rules for the model
    factors = {}
    if p.tensor_parallel_degree > 1 and not p.disable_sequence_parallel:
        factors["tensor_parallel_degree"] = p.tensor_parallel_degree
    if p.context_parallel_degree > 1:
        factors["context_parallel_degree"] = p.context_parallel_degree
        if p.balancing == "headtail":
            factors["2 (each rank has a part from the head and one from the tail)"] = 2
        if p.balancing == "documents":
            factors["2 (each rank has at least two pieces)"] = 2
    parts = math.prod(factors.values())
    lengths = {"training.seq_len": job.training.seq_len}
    if job.validation.enable and job.validation.seq_len:
        lengths["validation.seq_len"] = job.validation.seq_len
    for key, length in lengths.items():
        if length % parts:
            why = " x ".join(f"{key} {n}" if key[0] != "2" else key for key, n in factors.items())
            near = max(round(length / parts), 1) * parts
            message = f"it is not a multiple of {parts} ({why}); use {near}"
            yield Problem(key, message, DEGREES)


def batches(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that a global batch is divisible into microbatches on each rank, and into lanes."""
    t, degrees = job.training, job.degrees(world.ranks)
    if t.global_batch_size == 0 or (ranks := job.data_ranks(degrees)) < 1:
        return  # already reported for training, the degrees, or the groups
    batch, local = job.global_batch(degrees), t.local_batch_size
    on = counted(ranks, "data-parallel rank")
    rests_on = ("training.local_batch_size", BATCH, *DEGREES, *GROUPS)
    if not _divides(batch, ranks, local):
        why = f"it is not a multiple of {on}"
        if batch % ranks == 0:
            why = (
                f"it is {batch // ranks:,} sequences on each of {on}, more than "
                f"training.local_batch_size {local:,} and not a multiple of it"
            )
        yield Problem(BATCH, f"{why}; use {_nearest(batch, ranks, local)}", rests_on)
        return
    lanes = least_lanes(job.step_sizes(degrees)) if t.stages else batch
    for problem in job.data.batch_problems(lanes, ranks):
        yield problem.within("data")._replace(also=("data", *rests_on))


def _divides(batch: int, ranks: int, local: int) -> bool:
    """Whether a batch has equal parts for the ranks: one of up to `local` sequences, or several."""
    share, rest = divmod(batch, ranks)
    return not rest and (share <= local or share % local == 0)


def _nearest(batch: int, ranks: int, local: int) -> str:
    """Return the nearest batches that the ranks can divide."""
    below, above = batch // ranks, -(-batch // ranks)
    below = below if below <= local else below // local * local
    above = above if above <= local else -(-above // local) * local
    return " or ".join(str(share * ranks) for share in (below, above) if share)


def divisors(count: int) -> str:
    return alternatives(n for n in range(1, count + 1) if count % n == 0)


def alternatives(numbers: Iterable[int]) -> str:
    found = [str(n) for n in numbers]
    return " or ".join(filter(None, [", ".join(found[:-1]), found[-1]]))
