"""The numbers of a run, read from its folder."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.tools.compare.results import FinishedRun, RunCurve, Spread
from torchtitan.tools.compare.running import read_outcome
from torchtitan.tools.history import RunHistory, seconds_of
from torchtitan.tools.trace_summary import read_trace

NOT_RECORDED = "the run did not record its collectives (comm.trace_buf_size, save_events)"


def spread(values: Sequence[float]) -> Spread | None:
    """Compute median, quartiles (by linear interpolation) and extremes; None without values."""
    if not values:
        return None
    several = values if len(values) > 1 else [*values, *values]
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return Spread(middle, low, high, min(values), max(values), len(values))


class MeasuredRun:
    """A finished run: its numbers in the steps that are measured."""

    def __init__(self, folder: Path, round: int, seed: int, warmup: int, last: int | None) -> None:
        """The measured steps are those after `warmup`, up to `last` (None: to the end)."""
        self.folder, self.round, self.seed, self.warmup = folder, round, seed, warmup
        self.history = RunHistory.open(folder)
        self.last = math.inf if last is None else last
        self.all = [row for row in self.history.reports if row["step"] <= self.last]
        self.rows = [row for row in self.all if row["step"] > warmup]
        self.tps: list[float] = [row["tps"] for row in self.rows if row["tps"]]
        """Units per second and device in each row."""
        self.step_seconds: list[float] = [r["step_time"] for r in self.rows if r["step_time"]]
        """Seconds per step in each row."""
        self.mfu: list[float] = [row["mfu"] for row in self.rows if row["mfu"] is not None]
        """MFU in each row, if the peak of the device is known."""
        self.memory_gib: float | None = max((row["memory_gib"] for row in self.all), default=None)
        """Peak memory of the worst rank over the whole run."""
        start = self.history.last_event("start")
        self.compile_s: float | None = start.get("compile_s") or None
        """Seconds in the compiler until the end of the first step; None if nothing is compiled."""
        self.state_bytes: int | None = start.get("state_bytes")
        """Bytes of optimizer states of rank 0 after the first step; None if unknown."""
        traffic = self.history.last_event("traffic")
        self.has_messages = bool(traffic.get("messages"))
        """Whether sends and receives were recorded, which gloo does not do."""
        self.collectives: list[dict[str, Any]] = traffic.get("collectives", [])
        """Collectives of a step of rank 0, by axis and operation, with the bytes that it sends."""
        self.sent = self.history.sent
        """Bytes that rank 0 sends in a step, by axis."""
        self.left_out: str = traffic.get("left_out", "") if traffic else NOT_RECORDED
        """The reason why `sent` is empty or incomplete, if it is."""

    @property
    def startup_s(self) -> float | None:
        """Seconds to the end of the first step, from the launch or else the process start."""
        outcome = read_outcome(self.folder)
        if outcome is not None and self.all:
            seconds: float = self.all[0]["time"] - outcome.launched
            return seconds
        start = self.history.last_event("start")
        parts = [start.get("before_first_step_s"), start.get("first_step_s")]
        return sum(parts) if all(part is not None for part in parts) else None  # type: ignore[arg-type]

    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds of all measured steps by phase, pauses included."""
        phases, pauses = seconds_of(
            (row, steps)
            for row, steps in self.history.report_steps()
            if self.warmup < row["step"] <= self.last
        )
        return phases | pauses if phases else {}

    def curve(self, key: str) -> RunCurve:
        """A value over all steps, including those that are not measured."""
        return RunCurve(
            tuple(row["step"] for row in self.all),
            tuple(row["tokens"] for row in self.all),
            tuple(_finite(row[key]) for row in self.all),
        )

    @property
    def experts(self) -> dict[str, float]:
        """Balance of experts in the last report, by name; empty without experts."""
        prefix, last = "experts/", self.all[-1] if self.all else {}
        return {k.removeprefix(prefix): v for k, v in last.items() if k.startswith(prefix)}

    @property
    def exposed(self) -> float | None:
        """Share of a traced step in which rank 0 communicated without computing."""
        path = self.history.newest_trace().get(0)
        if path is None:
            return None
        trace = read_trace(path)
        return trace.exposed / trace.span if trace.span else None

    def summary(self, root: Path) -> FinishedRun:
        """The entry of this run in the report; folders are relative to `root`."""
        inside = self.folder.is_relative_to(root)
        folder = self.folder.relative_to(root) if inside else self.folder
        return FinishedRun(str(folder), self.round, self.seed, spread(self.tps), self.startup_s)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
