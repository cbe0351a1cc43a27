"""Whether the ranks of a run fit in the memory of its machine, and what makes them fit."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torchtitan.checks.limits import pools
from torchtitan.config import Problem
from torchtitan.device import GIB, Device, DeviceType
from torchtitan.job import JobConfig
from torchtitan.plan.changes import Load, changes, described, no_change
from torchtitan.plan.hardware import hardware_of
from torchtitan.plan.plan import Plan, plan

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
