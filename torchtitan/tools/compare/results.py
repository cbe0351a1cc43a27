"""The results of a comparison as plain values: `report.json`, which the other formats only show.

The other formats round numbers, and compute none.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ran", "cannot run", "failed", "not run"]


@dataclass(frozen=True)
class Spread:
    """Statistics of the values of one quantity."""

    median: float
    quartile_1: float
    quartile_3: float
    least: float
    most: float
    count: int


@dataclass(frozen=True)
class RunCurve:
    """One value over the steps of a run, in the order of the steps."""

    steps: tuple[int, ...]
    units: tuple[int, ...]
    """Units trained on until each step, over all ranks."""
    values: tuple[float | None, ...]
    """Values; None where not finite."""


@dataclass(frozen=True)
class CurveDifference:
    """The largest difference of a curve from the baseline's, relative to the tolerance."""

    largest: float
    """Difference relative to the baseline's value."""
    step: int
    tolerance: float


@dataclass(frozen=True)
class Parity:
    """Whether a variant trains the run that the baseline trains."""

    verdict: Literal["baseline", "same", "differs", "not judged"]
    why: str
    """Sentence with the rule and the basis of the tolerance."""
    loss: CurveDifference | None = None
    grad_norm: CurveDifference | None = None


@dataclass(frozen=True)
class FinishedRun:
    """One run of a variant."""

    folder: str
    """Path relative to the report."""
    round: int
    seed: int
    tps: Spread | None
    """Units per second and device in the measured steps."""
    startup_s: float | None
    """Seconds from the launch to the end of the first step, compilation included."""
    note: str = ""


@dataclass(frozen=True)
class ComparedPlan:
    """The plan of a run."""

    figures: dict[str, float]
    """Figures that are measured too: `memory_gib`, and on known hardware `tps`, `step_s`, `mfu`."""
    peak_gib: float
    """Memory of the fullest rank, on the device and the host."""
    memory_gib: dict[str, float]
    """Memory of a rank by kind."""
    collectives: dict[tuple[str, str], tuple[int, float]]
    """Number of a step, and bytes that rank 0 sends, by axis and operation."""
    is_on_hardware: bool
    """Whether the hardware is known."""


@dataclass(frozen=True)
class Collectives:
    """The collectives of a step with the same axis and operation: recorded, and planned."""

    axis: str
    operation: str
    count: int | None
    """Number recorded on rank 0; None: this backend records none."""
    bytes: float | None
    """Bytes that rank 0 sends for all of them."""
    formula_count: int | None
    """Planned number; None if the plan has none."""
    formula_bytes: float | None
    """Planned bytes."""


@dataclass(frozen=True)
class Variant:
    """A recipe of the comparison, and the results of its runs."""

    name: str
    status: Status
    reasons: tuple[str, ...]
    """Reasons why it cannot run or failed, a line each."""
    differs: dict[str, Any]
    """Settings that are not the same in all variants, by dotted key."""
    ranks: int
    layout: dict[str, int]
    """Degree by axis of the mesh."""
    unit: str
    """Unit that is counted: tokens, or what its task counts."""
    units_per_step: int
    runs: tuple[FinishedRun, ...]
    tps: Spread | None
    """Units per second and device over all measured steps of all rounds."""
    ratio: Spread | None
    """Ratio of the median `tps` of a round to the baseline's in the same round."""
    step_s: Spread | None
    """Seconds per step, over the same steps as `tps`."""
    memory_gib: float | None
    """Peak memory of the worst rank."""
    mfu: float | None
    time_shares: dict[str, float]
    """Shares of the time of measured steps by phase, pauses included; their sum is 1."""
    exposed_communication: float | None
    """Share of a traced step in which rank 0 communicated without computing."""
    sent_bytes: dict[str, float]
    """Bytes that rank 0 sends in a step, by axis."""
    sent_note: str
    """Note on numbers in `sent_bytes` from a plan, or the reason why there are none."""
    startup_s: float | None
    compile_s: float | None
    parity: Parity
    loss: RunCurve | None
    """Loss of the first finished run."""
    grad_norm: RunCurve | None
    collectives: tuple[Collectives, ...] = ()
    memory_formula: dict[str, float] = field(default_factory=dict)
    """Planned memory of the fullest rank at its peak in GiB, by purpose."""
    state_bytes: int | None = None
    """Bytes of optimizer states of rank 0, as its run counted them."""
    experts: dict[str, float] = field(default_factory=dict)
    """Balance of experts in the last report: share of the busiest, and entropy."""
    expert_loads: dict[str, list[float]] = field(default_factory=dict)
    """Share of each expert in the choices of its block, when last measured."""
    planned: dict[str, float] | None = None
    """Planned figures by the names of the fields here; None without a plan."""


@dataclass(frozen=True)
class Report:
    """A comparison."""

    title: str
    description: str
    created: str
    """Time in ISO 8601."""
    command: str
    machine: dict[str, Any]
    """Device, platform and versions of the runs, not of the process that wrote the report."""
    conditions: dict[str, Any]
    """Rounds, steps, steps left out as warm-up, recipe."""
    baseline: str
    variants: tuple[Variant, ...]
    notes: tuple[str, ...]
    """Notes that a reader needs before comparing: unequal batches, unequal data, ..."""

    def to_json(self) -> str:
        """Serialize to JSON; values that are not finite are null already."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"

    @property
    def unit(self) -> str:
        """The unit of all variants, or "units" if they differ."""
        found = {variant.unit for variant in self.variants}
        return found.pop() if len(found) == 1 else "units"

    @property
    def ran(self) -> tuple[Variant, ...]:
        """The variants with at least one finished run."""
        return tuple(variant for variant in self.variants if variant.status == "ran")
