"""Whether the ranks of a run fit in the memory of its machine, and what makes them fit."""

import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from torchtitan.checks.memory_limits import of_rank
from torchtitan.config import Problem, RecipeError
from torchtitan.device import GIB, Device, DeviceType, pick, smallest
from torchtitan.estimate.changes import Load, changes, described, no_change
from torchtitan.estimate.hardware import hardware_of
from torchtitan.estimate.plan import Plan, plan
from torchtitan.job import JobConfig

SHOWN_GIB = 0.05
"""Memory of a kind that is too little to be listed."""
BATCH, MODEL = "training.local_batch_size", "model.flavor"


class PlannedPeak(NamedTuple):
    """Peak GiB of the fullest rank by its plan."""

    device: float
    """Memory that the allocator reserves, and that outside of it."""
    host: float
    """Offloaded tensors in host memory."""
    by_kind: Mapping[str, float]


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


def plan_on(
    job: JobConfig,
    ranks: int,
    device_type: DeviceType,
    device: str,
    capacity_gib: float | None = None,
) -> Plan:
    """Plan a recipe on devices that exist.

    Args:
        device: name of the devices; empty if it is unknown.

    Raises:
        RecipeError: if the recipe cannot be planned.
    """
    hardware = hardware_of(job.job.hardware, device_type, device)
    return plan(job, ranks, hardware, device_type=device_type, capacity_gib=capacity_gib)


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


def misfits(
    job: JobConfig, ranks: int, local_ranks: int, device_type: str, load: Load | None = None
) -> Iterator[Problem]:
    """Find that ranks cannot fit in the memory of this machine, even if it were all free.

    Only a lower bound refuses a run: a plan may be wrong by more than is missing.

    Args:
        local_ranks: number of ranks that share this machine.
        load: loads the recipe with changes, to find some after which it fits.
    """
    bounds = of_rank(job, ranks)
    if bounds is None or device_type != pick().type:
        return
    least, local = bounds.least(), min(local_ranks, ranks)
    device = smallest(local)
    for pool in pools(device, local, least.on_device / GIB, least.on_host / GIB):
        if pool.holds <= (limit := pool.device.memory_limit()):
            continue
        fix = "torchtitan plan lists changes after which a recipe fits"
        if load and pool.device == device:
            try:
                words = (device.type, device.name, limit / pool.ranks)
                fix = remedy(plan_on(job, ranks, *words), load)
            except RecipeError as error:
                fix = error.lines[0]
        of_samples = least.activations + least.logits
        yield Problem(
            BATCH if 2 * of_samples > least.total else MODEL,
            f"{pool.subject} at least {pool.holds:,.1f} GiB, and {pool} has {limit:,.1f}; {fix}",
        )


def room(
    job: JobConfig, ranks: int, local_ranks: int, device: Device, peak: PlannedPeak | None = None
) -> Iterator[Problem]:
    """Note when the ranks of this machine may not fit in the free memory.

    A plan takes seconds, so that of a launch is made only if an upper bound of the memory is more
    than what is free.

    Args:
        device: device of this process, since querying its free memory allocates some of it.
        peak: the peak, if it is known.
    """
    bounds, local = of_rank(job, ranks), min(local_ranks, ranks)
    if bounds is None:
        return
    free = {each.type: each.memory_available() for each in (device, Device("cpu"))}
    if peak is None:
        most = bounds.most() / GIB
        on_host = most if bounds.offloads else 0.0
        used = pools(device, local, most, on_host)
        if all(pool.holds <= free[pool.device.type] for pool in used):
            return
        # In a process of its own, since it leaves traces in torch's state.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
            found = other.submit(_peak_or_reason, job, ranks, device.type, device.name).result()
        if isinstance(found, str):
            yield Problem(BATCH, f"whether it fits in memory is unknown: {found}", (), "note")
            return
        peak = found
    for pool in pools(device, local, peak.device, peak.host):
        if pool.holds > (left := free[pool.device.type]):
            of_samples = sum(peak.by_kind.get(kind, 0.0) for kind in ("activations", "logits"))
            message = (
                f"{pool.subject} about {pool.holds:,.1f} GiB by its plan, and {left:,.1f} of "
                f"{pool} are free; each: {in_words(peak.by_kind)}; torchtitan plan lists changes "
                "after which it fits"
            )
            path = BATCH if 2 * of_samples > sum(peak.by_kind.values()) else MODEL
            yield Problem(path, message, (), "note")


def _peak_or_reason(
    job: JobConfig, ranks: int, device_type: DeviceType, device: str
) -> PlannedPeak | str:
    """Return the peak of a plan, or the reason why there is none."""
    try:
        return peak_of(plan_on(job, ranks, device_type, device))
    except RecipeError as error:
        return error.lines[0]
