"""What a comparison found, as plain values: `report.json`; the other forms only show it.

Every number is of one place: a form that shows it rounds it, and computes nothing.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ran", "cannot run", "failed", "not run"]


@dataclass(frozen=True)
class Spread:
    """Values of one quantity."""

    median: float
    quartile_1: float
    quartile_3: float
    least: float
    most: float
    count: int


@dataclass(frozen=True)
class Curve:
    """One value over the steps of a run, in the order of the steps."""

    steps: tuple[int, ...]
    units: tuple[int, ...]
    """Trained on until then, over all ranks."""
    values: tuple[float | None, ...]
    """None: not finite."""


@dataclass(frozen=True)
class CurveDifference:
    """How far a curve is from the baseline's, where it is farthest by what is allowed there."""

    largest: float
    """Relative to the baseline's value."""
    step: int
    tolerance: float


@dataclass(frozen=True)
class Parity:
    """Whether a variant trains the run that the baseline trains."""

    verdict: Literal["baseline", "same", "within seeds", "differs", "not judged"]
    why: str
    """A sentence, with the rule and what the tolerance was derived from."""
    loss: CurveDifference | None = None
    grad_norm: CurveDifference | None = None


@dataclass(frozen=True)
class FinishedRun:
    """One run of a variant."""

    folder: str
    """Relative to the report."""
    round: int
    seed: int
    tps: Spread | None
    """Units a second and device, of the steps that are measured."""
    startup_s: float | None
    """From the launch to the end of the first step, its compiling included."""
    note: str = ""


@dataclass(frozen=True)
class Collectives:
    """Those of a step alike in axis and operation: recorded, and by formula."""

    axis: str
    operation: str
    count: int | None
    """As recorded, of rank 0; None: this backend records none."""
    bytes: float | None
    """That rank 0 sends for all of them."""
    formula_count: int | None
    """None: there is no formula."""
    formula_bytes: float | None


@dataclass(frozen=True)
class Variant:
    """A recipe of the comparison, and what its runs came to."""

    name: str
    status: Status
    reasons: tuple[str, ...]
    """Why it cannot run, or what it failed of, a line each."""
    differs: dict[str, Any]
    """Settings that are not the same in all variants, by dotted key."""
    ranks: int
    layout: dict[str, int]
    """Degree by axis of the mesh."""
    unit: str
    """What is counted: tokens, or images."""
    units_per_step: int
    runs: tuple[FinishedRun, ...]
    tps: Spread | None
    """Units a second and device, of all measured steps of all rounds."""
    ratio: Spread | None
    """Of a round's median of tps to the baseline's of the same round."""
    step_s: Spread | None
    """Seconds a step, as `tps`."""
    memory_gib: float | None
    """Peak of the worst rank."""
    mfu: float | None
    time_shares: dict[str, float]
    """Share of the time of measured steps by phase, pauses included; they add up to 1."""
    exposed_communication: float | None
    """Share of a traced step in which ranks communicated and computed nothing (rank 0)."""
    sent_bytes: dict[str, float]
    """What rank 0 sends in a step, by axis."""
    sent_note: str
    """Where a number there is from a formula, or why there is none."""
    startup_s: float | None
    compile_s: float | None
    parity: Parity
    loss: Curve | None
    """Of the first finished run with the seed of the study."""
    grad_norm: Curve | None
    collectives: tuple[Collectives, ...] = ()
    memory_formula: dict[str, float] = field(default_factory=dict)
    """GiB that a rank holds by what they are for, by `estimate.memory`."""
    state_bytes: int | None = None
    """What the optimizer of rank 0 keeps, as its run counted it."""
    planned: dict[str, float] | None = None
    """What `torchtitan plan` foresaw, by the names used here; None: it was not asked."""


@dataclass(frozen=True)
class Report:
    """A comparison."""

    title: str
    description: str
    created: str
    """ISO 8601."""
    command: str
    machine: dict[str, Any]
    """Device, platform, versions: of the runs, not of who wrote the report."""
    conditions: dict[str, Any]
    """Rounds, steps, steps left out as warm-up, seeds, recipe."""
    baseline: str
    variants: tuple[Variant, ...]
    notes: tuple[str, ...]
    """What a reader has to know before comparing: unequal batches, unequal data, ..."""

    def to_json(self) -> str:
        """The whole as JSON; numbers that are not finite are null already."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"

    @property
    def unit(self) -> str:
        """What all variants count, if that is the same."""
        found = {variant.unit for variant in self.variants}
        return found.pop() if len(found) == 1 else "units"

    @property
    def ran(self) -> tuple[Variant, ...]:
        """The variants with at least one finished run."""
        return tuple(variant for variant in self.variants if variant.status == "ran")
