"""The facts about a run, as numbers, from the files in its folder."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan.tools.explain.slowest_ranks import Slowest, slowest_by_phase
from torchtitan.tools.explain.trace_summary import read_trace
from torchtitan.tools.history import Row, RunHistory, RunState, median, seconds_of, traces_in

# A trace may be of hundreds of megabytes.
MOST_TRACES = 8


@dataclass(frozen=True)
class Traces:
    """A summary of the newest traces of a run, for the ranks that were read."""

    folder: str
    steps: int
    compute_s: dict[int, float]
    """Seconds of computation in a step, by rank."""
    exposed: dict[int, float]
    """Share of the traced time with exposed communication, by rank."""
    idle: dict[int, float]
    left_out: int
    """Number of ranks whose trace was not read."""


@dataclass(frozen=True)
class Facts:
    """The facts about a run; None, 0 or empty where its folder has nothing about it."""

    folder: Path
    recipe: Mapping[str, Any]
    """Settings by dotted key."""
    ranks: int | None
    device: str | None
    on_cuda: bool
    layout: dict[str, int]
    step: int
    state: RunState
    unit: str
    """Unit that is counted: tokens, or what its task counts."""
    units: int
    units_a_step: int | None
    rate: float | None
    """Median units per second and device; all speeds are medians."""
    mfu: float | None
    step_s: float | None
    phases: dict[str, float]
    """Seconds of a step, by phase."""
    pauses: dict[str, float]
    """Seconds in total, by pause."""
    validations: int
    reported_s: float
    """Seconds of all phases and pauses together."""
    first_step_s: float | None
    before_first_step_s: float | None
    compile_s: float | None
    sent: dict[str, float]
    """Bytes that rank 0 sends in a step, by axis."""
    slowest: list[Slowest]
    memory_gib: float | None
    memory_pct: float | None
    skipped: int
    events: dict[str, int]
    """Number of events of each kind."""
    traces: Traces | None

    @property
    def startup_s(self) -> float | None:
        """Seconds from the start of the process to the end of its first step."""
        if self.before_first_step_s is None or self.first_step_s is None:
            return self.first_step_s
        return self.before_first_step_s + self.first_step_s

    def share(self, phase: str) -> float:
        """The share of a phase in the time of a step."""
        return self.phases.get(phase, 0.0) / (sum(self.phases.values()) or 1.0)

    def share_of_pause(self, name: str) -> float:
        """The share of a pause in all reported time."""
        return self.pauses.get(name, 0.0) / self.reported_s if self.reported_s else 0.0


def read_facts(history: RunHistory) -> Facts:
    """Read the facts about a run from its dump folder."""
    recipe, logs = history.recipe, history.rank_events
    starts = [[row for row in log if row["event"] == "start"] for log in logs.values()]
    last_starts = [of_rank[-1] for of_rank in starts if of_rank]
    # The first report of each process is of a step that also starts up.
    first_steps = {row["step"] for of_rank in starts for row in of_rank}
    later = [(row, n) for row, n in history.report_steps()[1:] if row["step"] not in first_steps]
    seconds, pauses = seconds_of(later)
    # No report follows the last validation and the last save.
    for end in (row for row in logs.get(0, ()) if row["event"] == "end"):
        for name, paused in end.get("pauses", {}).items():
            pauses[name] = pauses.get(name, 0.0) + paused
    all_reports, reports = history.reports, [row for row, _ in later]
    last = all_reports[-1] if all_reports else {}
    steps = sum(count for _, count in later)
    return Facts(
        folder=history.folder,
        recipe=recipe,
        ranks=history.ranks,
        device=history.device,
        on_cuda=history.device_type == "cuda",
        layout=history.layout,
        step=last.get("step", 0),
        state=history.state(),
        unit=history.unit,
        units=last.get("tokens", 0),
        units_a_step=_units_a_step(all_reports),
        rate=median(row["tps"] for row in reports),
        mfu=median(row.get("mfu") for row in reports),
        step_s=median(row.get("step_time") for row in reports),
        phases={name: total / steps for name, total in seconds.items()},
        pauses=pauses,
        validations=len(history.validations),
        reported_s=sum(seconds.values()) + sum(pauses.values()),
        first_step_s=_largest(last_starts, "first_step_s"),
        before_first_step_s=_largest(last_starts, "before_first_step_s"),
        compile_s=_largest(last_starts, "compile_s"),
        sent=history.sent,
        slowest=slowest_by_phase(logs, history.layout.get("pp", 1)),
        memory_gib=_largest(all_reports, "memory_gib"),
        memory_pct=_largest(all_reports, "memory_pct"),
        skipped=sum(row.get("skipped", 0) for row in all_reports),
        events=dict(Counter(row["event"] for row in history.rows if "event" in row)),
        traces=_traces(history),
    )


def _units_a_step(reports: Sequence[Row]) -> int | None:
    found = median(
        (after["tokens"] - before["tokens"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(reports)
        if after["step"] > before["step"]
    )
    return None if found is None else round(found)


def _traces(history: RunHistory) -> Traces | None:
    paths = history.newest_trace()
    if not paths:
        return None
    folder = next(iter(paths.values())).parent
    return replace(read_rank_traces(folder), folder=str(folder.relative_to(history.folder)))


def read_rank_traces(folder: Path) -> Traces:
    """Summarize the traces of the ranks in a folder."""
    paths = traces_in(folder)
    found = {rank: read_trace(paths[rank]) for rank in list(paths)[:MOST_TRACES]}
    return Traces(
        folder=str(folder),
        steps=max((trace.steps for trace in found.values()), default=0),
        compute_s={rank: trace.compute / max(trace.steps, 1) for rank, trace in found.items()},
        exposed={rank: trace.exposed / (trace.span or 1) for rank, trace in found.items()},
        idle={rank: trace.idle / (trace.span or 1) for rank, trace in found.items()},
        left_out=len(paths) - len(found),
    )


def _largest(rows: Sequence[Row], key: str) -> float | None:
    known = [row[key] for row in rows if row.get(key) is not None]
    return max(known, default=None)
