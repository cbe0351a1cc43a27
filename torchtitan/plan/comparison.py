"""The plan of a recipe, next to what was measured: in `torchtitan compare`, and of one run."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from torchtitan.device import DeviceType
from torchtitan.job import JobConfig
from torchtitan.metrics.startup import NEIGHBORS
from torchtitan.parallel.world import JOINED_AXES
from torchtitan.plan.fitting import peak_of, plan_on, reported_gib
from torchtitan.plan.messages import link_traffic
from torchtitan.plan.plan import MEMORY_LIMITS, TIME_LIMITS, Plan, Range
from torchtitan.plan.speed import StepTime
from torchtitan.tools.compare.results import ComparedPlan
from torchtitan.tools.history import RunHistory, median, seconds_of

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
        found[kind] = count + one.count, size + one.bytes
    return found


class PlannedMeasured(NamedTuple):
    """A planned quantity, and the measured one; None: not planned, or not measured."""

    quantity: str
    unit: str
    planned: float | None
    measured: float | None
    low: float | None = None
    high: float | None = None


def measured_rows(plan: Plan, history: RunHistory) -> list[PlannedMeasured]:
    """Return the memory, speed and step time of a plan, next to the measurements of a run.

    Measurements are medians over the reports after the first of each launch, which starts up.
    """
    starts = {row["step"] for log in history.rank_events.values() for row in log if _starts(row)}
    later = [(row, n) for row, n in history.report_steps()[1:] if row["step"] not in starts]
    reports = [row for row, _ in later]
    is_cuda = plan.device_type == "cuda"
    what = "reserved at the peak" if is_cuda else "process at the peak"
    peaks = [r["memory_gib"] for r in history.reports if r.get("memory_gib") is not None]
    memory = Range.within(reported_gib(plan), MEMORY_LIMITS)
    found = [PlannedMeasured(what, "GiB", memory.value, max(peaks, default=None), *memory[1:])]
    if (time := plan.time) is None:
        return found
    rate, (fast, slow) = time.tokens_per_second_per_device, TIME_LIMITS
    tps = median(row["tps"] for row in reports)
    unit = f"{history.unit}/s/device"
    found.append(PlannedMeasured("speed", unit, rate, tps, rate / slow, rate / fast))
    step = Range.within(time.seconds, TIME_LIMITS)
    seconds = median(row.get("step_time") for row in reports)
    found.append(PlannedMeasured("step", "s", step.value, seconds, *step[1:]))
    steps = sum(count for _, count in later) or 1
    phases = {name: total / steps for name, total in seconds_of(later)[0].items()}
    for name, planned, own in _parts(time):
        known = [phases[phase] for phase in own if phase in phases]
        if known or planned:
            found.append(PlannedMeasured(f"  {name}", "s", planned, sum(known) if known else None))
    return found


def _starts(row: dict[str, object]) -> bool:
    return row["event"] == "start"


def _parts(time: StepTime) -> Iterator[tuple[str, float | None, tuple[str, ...]]]:
    """Yield the parts of a step: the name, the planned seconds, and the measured phases."""
    exposed = dict(time.exposed)
    agreement, between = exposed.pop("all", 0.0), exposed.pop("pp", 0.0)
    passes = time.compute + time.host_bound + sum(exposed.values())
    yield "forwards and backwards", passes, ("forward", "backward")
    yield "other stages", time.bubble + between, ("pipeline",)
    yield "gradient norm and update", time.update, ("clip", "optimizer")
    yield "agreement of ranks", agreement, ("sync",)
    yield "all else, not planned", None, ("data", "other")


def measured_text(rows: Sequence[PlannedMeasured]) -> Iterator[str]:
    """Yield a table of the quantities, planned and measured."""
    yield f"{'measured by the run':<28} {'planned':>9} {'':<20} {'measured':>9}"
    for row in rows:
        planned, measured, low, high = map(_digits, row[2:])
        limits = "" if row.low is None else f"({low} to {high})"
        yield f"  {row.quantity:<26} {planned:>9} {limits:<20} {measured:>9} {row.unit}".rstrip()


def _digits(value: float | None) -> str:
    """Format a number with three digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
