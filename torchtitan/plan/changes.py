"""The cheapest changes of a recipe that make it fit in the memory of a device."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torchtitan.checks.limits import model_states
from torchtitan.config import RecipeError
from torchtitan.job import JobConfig
from torchtitan.plan.compiled import SharedGraphs
from torchtitan.plan.plan import Plan, plan

Load = Callable[[int, Sequence[str]], JobConfig]
"""Function from a number of ranks and additional flags to the recipe, or a RecipeError."""

MOST_TRIED = 24
"""Number of changes that are planned at most; each takes a second or more."""


@dataclass(frozen=True)
class FittingChange:
    """Flags that make a recipe fit."""

    flags: tuple[str, ...]
    plan: Plan

    def slowdown(self, before: Plan) -> float | None:
        """Return the device time of a step as a multiple of that of `before`; None: unknown."""
        if self.plan.time is None or before.time is None:
            return None
        devices = self.plan.ranks / before.ranks
        return self.plan.time.seconds * devices / before.time.seconds


def described(flags: Sequence[str], reserved_gib: float, device_time: float | None) -> str:
    """Describe a change with what it leads to."""
    cost = "" if device_time is None else f", {device_time:.2f} times the device time"
    return f"{' '.join(flags)} ({reserved_gib:.1f} GiB reserved{cost})"


def no_change(least_devices: int | None) -> str:
    """Tell what to do where no change makes a recipe fit."""
    more = f"use at least {least_devices:,} devices or " if least_devices else ""
    return f"no change was found after which it fits: {more}devices with more memory"


def changes(
    load: Load, before: Plan, most: int = 3, *, count: Callable[[int], None] = lambda _: None
) -> list[FittingChange]:
    """Return up to `most` changes after which a plan that does not fit does, the cheapest first.

    Args:
        count: receives the number of recorded ranks.
    """
    recorded = itertools.count(1)
    assert before.capacity_gib is not None, "without a capacity everything fits"
    found: list[FittingChange] = []
    with SharedGraphs() as graphs:
        for ranks, flags, job in itertools.islice(_loaded(load, before), MOST_TRIED):
            try:
                tried = plan(
                    job,
                    ranks,
                    before.hardware,
                    device_type=before.device_type,
                    capacity_gib=before.capacity_gib,
                    probe=before.fullest.stage_ranks[0],
                    graphs=graphs,
                    count=lambda _: count(next(recorded)),
                )
            except RecipeError:
                continue
            if tried.fits:
                words = ("--world-size", str(ranks)) * (ranks != before.ranks)
                found.append(FittingChange((*words, *flags), tried))
            if len(found) == most:
                break
    return sorted(found, key=lambda change: change.slowdown(before) or 0.0)


def _loaded(load: Load, before: Plan) -> Iterator[tuple[int, tuple[str, ...], JobConfig]]:
    """Yield the candidates that are valid, and whose model states fit."""
    assert before.capacity_gib is not None
    for ranks, flags in _candidates(before):
        try:
            job = load(ranks, flags)
        except RecipeError:
            continue
        if model_states(job, ranks).device <= before.capacity_gib:
            yield ranks, flags, job


def _candidates(before: Plan) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield numbers of ranks and flags, those that usually cost little first.

    None of them changes what a run computes.
    """
    job, ranks = before.job, before.ranks
    same: tuple[str, ...] = ()
    if job.training.global_batch_size == -1:
        batch = job.global_batch(job.degrees(ranks))
        same = "--training.global_batch_size", str(batch)
    singles = [*_singles(job)]
    yield from ((ranks, (*flags, *same)) for flags in singles)
    yield from ((ranks * times, same) for times in (2, 4, 8))
    for one, other in itertools.combinations(singles, 2):
        if one[0] != other[0]:
            yield ranks, (*one, *other, *same)
    yield from ((ranks * 8, (*flags, *same)) for flags in singles)


def _singles(job: JobConfig) -> Iterator[tuple[str, ...]]:
    if job.loss.vocabulary_chunk == 0:
        yield "--loss.vocabulary_chunk", "8192"
    if job.training.local_batch_size > 1 and job.parallelism.pipeline_parallel_degree == 1:
        yield "--training.local_batch_size", "1"
    recomputed = job.activation_checkpoint
    mode, option = "--activation_checkpoint.mode", "--activation_checkpoint.selective_ac_option"
    if recomputed.mode == "none":
        yield mode, "selective", option, "op"
    if recomputed.mode != "full":
        yield mode, "full"
    if job.parallelism.fsdp_reshard_after_forward != "always":
        yield "--parallelism.fsdp_reshard_after_forward", "always"
    tensor = "--parallelism.tensor_parallel_degree"
    for degree in (2, 4, 8):
        if degree > job.parallelism.tensor_parallel_degree:
            yield tensor, str(degree)
