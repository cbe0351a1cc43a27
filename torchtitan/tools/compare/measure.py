"""The numbers of a run, read from its folder."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.tools.compare.launch import read_outcome
from torchtitan.tools.compare.report import Curve, FinishedRun, Spread
from torchtitan.tools.explain.trace import read_trace
from torchtitan.tools.history import RunHistory, seconds_of


def spread(values: Sequence[float]) -> Spread | None:
    """Compute median, quartiles (by linear interpolation) and extremes; None without values."""
    if not values:
        return None
    several = values if len(values) > 1 else [*values, *values]
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return Spread(middle, low, high, min(values), max(values), len(values))


class Measured:
    """A finished run: its numbers in the steps that are measured."""

    def __init__(self, folder: Path, round: int, seed: int, warmup: int, last: int | None) -> None:
        """The measured steps are those after `warmup`, up to `last` (None: to the end)."""
        self.folder, self.round, self.seed, self.warmup = folder, round, seed, warmup
        self.history = RunHistory.open(folder)
        self.last = math.inf if last is None else last
        self.all = [row for row in self.history.reports if row["step"] <= self.last]
        self.rows = [row for row in self.all if row["step"] > warmup]

    @property
    def tps(self) -> list[float]:
        """Units per second and device in each row."""
        return [row["tps"] for row in self.rows if row["tps"]]

    @property
    def step_seconds(self) -> list[float]:
        """Seconds per step in each row."""
        return [row["step_time"] for row in self.rows if row["step_time"]]

    @property
    def memory_gib(self) -> float | None:
        """Peak memory of the worst rank over the whole run."""
        return max((row["memory_gib"] for row in self.all), default=None)

    @property
    def mfu(self) -> list[float]:
        """MFU in each row, if the peak of the device is known."""
        return [row["mfu"] for row in self.rows if row["mfu"] is not None]

    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds of all measured steps by phase, pauses included."""
        phases, pauses = seconds_of(
            (row, steps)
            for row, steps in self.history.report_steps()
            if self.warmup < row["step"] <= self.last
        )
        return phases | pauses if phases else {}

    def curve(self, key: str) -> Curve:
        """A value over all steps, including those that are not measured."""
        return Curve(
            tuple(row["step"] for row in self.all),
            tuple(row["tokens"] for row in self.all),
            tuple(_finite(row[key]) for row in self.all),
        )

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

    @property
    def compile_s(self) -> float | None:
        """Seconds in the compiler until the end of the first step; None if nothing is compiled."""
        seconds: float = self.history.last_event("start").get("compile_s", 0.0)
        return seconds or None

    @property
    def state_bytes(self) -> int | None:
        """Bytes of optimizer states of rank 0 after the first step; None if unknown."""
        size: int | None = self.history.last_event("start").get("state_bytes")
        return size

    @property
    def has_messages(self) -> bool:
        """Whether sends and receives were recorded, which gloo does not do."""
        return bool(self.history.last_event("traffic").get("messages"))

    @property
    def collectives(self) -> list[dict[str, Any]]:
        """Collectives of a step of rank 0, by axis and operation, with the bytes that it sends."""
        found: list[dict[str, Any]] = self.history.last_event("traffic").get("collectives", [])
        return found

    @property
    def sent(self) -> tuple[dict[str, float], str]:
        """Bytes that rank 0 sends in a step, by axis; and the reason if there are none."""
        event = self.history.last_event("traffic")
        if not event:
            return {}, "the run did not record its collectives (comm.trace_buf_size, save_events)"
        return self.history.sent, event.get("left_out", "")

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
