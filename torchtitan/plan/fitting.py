"""Whether the ranks of a run fit in the memory of its machine, and changes that make them fit."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from torchtitan.checks.limits import model_states, pools
from torchtitan.config import Problem, RecipeError
from torchtitan.device import GIB, Device, DeviceType, pick
from torchtitan.job import JobConfig
from torchtitan.plan.compiled import SharedGraphs
from torchtitan.plan.hardware import find_hardware, hardware_of
from torchtitan.plan.plan import Plan, plan
from torchtitan.tools.options import progress

Load = Callable[[int, Sequence[str]], JobConfig]
"""Function from a number of ranks and additional flags to the recipe, or a RecipeError."""

MOST_TRIED = 24
"""Number of changes that are planned at most; each takes a second or more."""
SHOWN_GIB = 0.05
"""Memory of a kind that is too little to be listed."""
BATCH, MODEL = "training.local_batch_size", "model.flavor"


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
    yield from ((ranks * times, (*flags, *same)) for times in (2, 4, 8) for flags in singles)


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


class PlannedPeak(NamedTuple):
    """Peak GiB of the fullest rank by its plan."""

    device: float
    """Memory that the allocator reserves, and that outside of it."""
    host: float
    """Offloaded tensors in host memory."""
    by_kind: Mapping[str, float]


def plan_on(job: JobConfig, ranks: int, device_type: DeviceType, device: str) -> Plan:
    """Plan a recipe on devices that exist.

    Args:
        device: name of the devices; empty if it is unknown.

    Raises:
        RecipeError: if the recipe cannot be planned.
    """
    hardware = hardware_of(job.job.hardware, device_type, device)
    return plan(job, ranks, hardware, device_type=device_type)


def peak_of(plan: Plan) -> PlannedPeak:
    """Return the peak of the fullest rank of a plan."""
    is_apart = plan.device_type == "cuda"
    on_host = max(kind.step.host_bytes() for kind in plan.kinds) / GIB if is_apart else 0.0
    return PlannedPeak(plan.reserved_gib.value + plan.outside_gib, on_host, plan.by_kind_gib)


def reported_gib(plan: Plan) -> float:
    """Return the peak memory as a run reports it: reserved on CUDA, on a CPU of the process."""
    outside = plan.outside_gib if plan.device_type == "cpu" else 0.0
    return plan.reserved_gib.value + outside


def in_words(by_kind: Mapping[str, float]) -> str:
    """List the kinds of memory of which there is much, the largest first."""
    large = sorted(by_kind.items(), key=lambda each: -each[1])
    return " + ".join(f"{kind} {size:.1f}" for kind, size in large if size >= SHOWN_GIB)


def remedy(before: Plan, load: Load) -> str:
    """Name the changes after which a plan that does not fit does."""
    uses = [
        described(each.flags, each.plan.reserved_gib.value, each.slowdown(before))
        for each in changes(load, before)
    ]
    return f"use {', or '.join(uses)}" if uses else no_change(before.least_devices)


def room(ranks: int, peak: PlannedPeak) -> Iterator[Problem]:
    """Note when the ranks of this host may not fit in its free memory by their plan."""
    (pool,) = pools(Device("cpu"), ranks, peak.device, peak.host)
    if pool.holds > (left := pool.device.memory_available()):
        of_samples = sum(peak.by_kind.get(kind, 0.0) for kind in ("activations", "logits"))
        message = (
            f"{pool.subject} about {pool.holds:,.1f} GiB by its plan, and {left:,.1f} of "
            f"{pool} are free; each: {in_words(peak.by_kind)}; torchtitan plan lists changes "
            "after which it fits"
        )
        path = BATCH if 2 * of_samples > sum(peak.by_kind.values()) else MODEL
        yield Problem(path, message, (), "note")


class PlannedMemory:
    """Planned memory of the fullest rank of a recipe, or the reason why there is no plan."""

    def __init__(
        self,
        job: JobConfig,
        ranks: int,
        device_type: str | None,
        capacity_gib: float | None,
        count: Callable[[int], None],
    ) -> None:
        """Plan a recipe for the hardware that it states, or for another type of device."""
        self.ranks, self.reason = ranks, ""
        self.plan: Plan | None = None
        try:
            stated = job.job.hardware
            hardware = find_hardware(stated, "job.hardware") if stated else None
            if hardware and device_type not in (None, hardware.device_type):
                hardware = None
            self.plan = plan(
                job,
                ranks,
                hardware,
                device_type=cast(DeviceType, device_type or pick().type),
                capacity_gib=capacity_gib,
                count=count,
            )
        except RecipeError as error:
            self.reason = error.lines[0]

    def refusal(self, load: Load) -> str:
        """Return why a rank does not fit into its device by its plan; empty if it does."""
        if self.plan is None or self.plan.fits:
            return self.reason
        with progress("looking for changes after which it fits"):
            fix = remedy(self.plan, load)
        return f"a rank takes {peak_of(self.plan).device:.1f} GiB by its plan; {fix}"

    def notes(self) -> Iterator[Problem]:
        """Note when the ranks may not fit in the free memory of this host."""
        if self.plan is not None:
            yield from room(self.ranks, peak_of(self.plan))

    def summary(self) -> str:
        """Describe the memory of the fullest rank."""
        if self.plan is None:
            return f"planned memory: unknown, as {self.reason}"
        return memory(self.plan)


def memory(planned: Plan) -> str:
    """Describe the memory of the fullest rank."""
    of, device = "of the fullest rank" if len(planned.kinds) > 1 else "of a rank", planned.hardware
    room, capacity, fits = planned.room_gib, planned.capacity_gib, ""
    if room is not None:
        fits = f"; {room:.1f} of {capacity:.1f} remain"
        if room < 0:
            fits = f"; it does not fit: {-room:.1f} too much for {capacity:.1f}"
    kinds = f" ({large})" if (large := in_words(planned.by_kind_gib)) else ""
    outside = f", {planned.outside_gib:.1f} outside the allocator" if planned.outside_gib else ""
    return (
        f"planned memory {of} on {device.name if device else planned.device_type}: "
        f"{planned.allocated_gib.value:.1f} GiB allocated, {planned.reserved_gib.value:.1f} "
        f"reserved{outside}{kinds}{fits}"
    )
