"""The plan of a run, as `torchtitan compare` reports it."""

from typing import cast

from torchtitan.device import DeviceType
from torchtitan.job import JobConfig
from torchtitan.metrics.startup import NEIGHBORS
from torchtitan.parallel.world import JOINED_AXES
from torchtitan.plan.fitting import peak_of, plan_on, reported_gib
from torchtitan.plan.link_traffic import link_traffic
from torchtitan.plan.plan import Plan
from torchtitan.tools.compare.results import ComparedPlan

KINDS = ("parameters", "gradients", "states", "gathered", "activations", "logits")
"""Kinds of memory that every report has."""


def compared_plan(job: JobConfig, ranks: int, device_type: str, device: str) -> ComparedPlan:
    """Plan a recipe on devices of this name; empty if it is unknown.

    Raises:
        RecipeError: if the recipe cannot be planned.
    """
    plan = plan_on(job, ranks, cast(DeviceType, device_type), device)
    peak, figures = peak_of(plan), {"memory_gib": reported_gib(plan)}
    if plan.time:
        figures |= {"tps": plan.time.tokens_per_second_per_device, "step_s": plan.time.seconds}
        figures |= {} if plan.time.mfu is None else {"mfu": plan.time.mfu}
    by_kind = {kind.removeprefix("optimizer "): size for kind, size in plan.by_kind_gib.items()}
    return ComparedPlan(
        figures=figures,
        peak_gib=peak.device + peak.host,
        memory_gib=dict.fromkeys(KINDS, 0.0) | by_kind,
        collectives=planned_collectives(plan),
        is_on_hardware=plan.hardware is not None,
    )


def planned_collectives(plan: Plan) -> dict[tuple[str, str], tuple[int, float]]:
    """Count the collectives of a step and the bytes that rank 0 sends, by axis and operation."""
    degrees = plan.job.degrees(plan.ranks)
    used = [axis for axis, size in degrees._asdict().items() if size > 1]
    # A run names a group by the axes that it joins, and a mesh that FSDP2 makes for itself so.
    names = {"mesh_dim_1": NEIGHBORS}
    for name, axes in ({axis: (axis,) for axis in used} | JOINED_AXES).items():
        joined = [axis for axis in axes if axis in used]
        names[name] = "all" if joined == used and len(used) > 1 else "_".join(joined)
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for one in link_traffic(plan.kinds[0].step, plan.ranks):
        kind = names.get(one.axis, one.axis), one.operation
        count, size = found.get(kind, (0, 0.0))
        found[kind] = count + one.count, size + one.sent
    return found
