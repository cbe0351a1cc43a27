"""The prediction of a run by its plan, next to what was measured."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torchtitan.checks import TOKENIZER, load_job
from torchtitan.config import RecipeError
from torchtitan.estimate.fitting import plan_on, reported_gib
from torchtitan.estimate.plan import MEMORY_LIMITS, TIME_LIMITS, Plan, Range
from torchtitan.estimate.speed import StepTime
from torchtitan.provenance import RECIPE_FILE
from torchtitan.tools.explain.facts import Facts
from torchtitan.tools.history import RunHistory


class Predicted(NamedTuple):
    """A predicted quantity, and the measured one; None: not planned, or not measured."""

    quantity: str
    unit: str
    predicted: float | None
    measured: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Prediction:
    """The plan of a run next to its measurements."""

    hardware: str | None = None
    rows: list[Predicted] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def predict(history: RunHistory, facts: Facts) -> Prediction:
    """Plan the recipe of a run for its ranks and devices."""
    path = history.folder / RECIPE_FILE
    if not path.is_file() or facts.ranks is None:
        return Prediction(notes=["there is no prediction, as its recipe or ranks are unknown"])
    try:
        found = load_job(path, (), facts.ranks, history.device_type, exempt=(TOKENIZER,))
        plan = plan_on(found.config, facts.ranks, history.device_type, history.device or "")
    except RecipeError as error:
        return Prediction(notes=[f"there is no prediction: {error.lines[0]}"])
    notes = [*plan.notes]
    if plan.hardware is None:
        stated = plan.job.job.hardware
        reason = f"the recipe states {stated}" if stated else "the recipe states none"
        notes[0] = (
            f"the hardware is unknown ({reason}), so neither time nor memory outside the allocator "
            "is predicted"
        )
    name = plan.hardware.name if plan.hardware else None
    return Prediction(name, [*_memory(plan, facts), *_speed(plan, facts)], notes)


def _memory(plan: Plan, facts: Facts) -> Iterator[Predicted]:
    allocated = plan.allocated_gib
    yield Predicted("tensors at the peak", "GiB", allocated.value, None, *allocated[1:])
    what = "reserved at the peak" if facts.on_cuda else "process at the peak"
    peak = Range.within(reported_gib(plan), MEMORY_LIMITS)
    yield Predicted(what, "GiB", peak.value, facts.memory_gib, *peak[1:])


def _speed(plan: Plan, facts: Facts) -> Iterator[Predicted]:
    time = plan.time
    if time is None:
        return
    step, rate = Range.within(time.seconds, TIME_LIMITS), time.tokens_per_second_per_device
    fast, slow = TIME_LIMITS
    unit = f"{facts.unit}/s/device"
    yield Predicted("speed", unit, rate, facts.rate, rate / slow, rate / fast)
    yield Predicted("step", "s", step.value, facts.step_s, *step[1:])
    for name, seconds, phases in _parts(time):
        known = [facts.phases[phase] for phase in phases if phase in facts.phases]
        if known or seconds:
            yield Predicted(f"  {name}", "s", seconds, sum(known) if known else None)


def _parts(time: StepTime) -> Iterator[tuple[str, float | None, tuple[str, ...]]]:
    """Yield the parts of a step: the name, the predicted seconds, and the measured phases."""
    exposed = dict(time.exposed)
    agreement, between = exposed.pop("all", 0.0), exposed.pop("pp", 0.0)
    passes = time.compute + time.host_bound + sum(exposed.values())
    yield "forwards and backwards", passes, ("forward", "backward")
    yield "other stages", time.bubble + between, ("pipeline",)
    yield "gradient norm and update", time.update, ("clip", "optimizer")
    yield "agreement of ranks", agreement, ("sync",)
    yield "all else, not planned", None, ("data", "other")
