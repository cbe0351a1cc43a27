"""The rows of a run as they come in, and what can be told from them.

Of `metrics.jsonl` only what is new is read each time. A run that resumes or rolls back writes the
file anew, without the rows that no longer hold; then all of it is read again.
"""

import itertools
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.tools.history import Row, parse_rows

BLOCKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"

# Rows of what is measured now and then; they tell of no change in the run.
MEASUREMENTS = ("precision", "statistics")


class Tail:
    """The rows that a file has got since it was last looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._file: tuple[int, int] | None = None

    def new_rows(self) -> tuple[list[Row], bool]:
        """What is new; and whether that is all of a file which took the place of the last."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = status.st_dev, status.st_ino
                is_other = identity != self._file or status.st_size < self._read
                if is_other:
                    self._file, self._read = identity, 0
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return [], False  # moved aside by a run that begins: the new one is about to be there
        # A last line without its end is still being written.
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        return list(parse_rows(whole)), is_other


@dataclass
class RunSummary:
    """What the rows of a run tell, up to the last of them."""

    losses: list[float] = field(default_factory=list)
    """Of all reports; not a number where the loss was not finite."""
    grad_norms: list[float] = field(default_factory=list)
    report: Row = field(default_factory=dict)
    """The last row about training."""
    time: float | None = None
    """Of the last row of any kind."""
    validations: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    tokens: int = 0
    """Of all reports that tell a speed."""
    device_seconds: float = 0.0
    """What these took, times the number of devices."""

    def take(self, row: Row) -> None:
        """Go on to the next row."""
        self.time = row.get("time", self.time)
        if "event" in row:
            if row["event"] not in MEASUREMENTS:
                self.events.append(row)
        elif "validation_loss" in row:
            self.validations.append(row)
        elif "tps" in row:
            self._take_report(row)

    def _take_report(self, row: Row) -> None:
        self.losses.append(_number(row.get("loss")))
        self.grad_norms.append(_number(row.get("grad_norm")))
        if row.get("skipped"):
            event = {"event": "skipped", "step": row["step"], "time": row.get("time")}
            why = {"because": row["skipped_because"]} if "skipped_because" in row else {}
            self.events.append({**event, "steps": row["skipped"], **why})
        if row["tps"]:
            trained = row["tokens"] - self.report.get("tokens", 0)
            self.tokens += trained
            self.device_seconds += trained / row["tps"]
        self.report = row

    @property
    def mean_tps(self) -> float | None:
        """Tokens a second and device, over all reports."""
        return self.tokens / self.device_seconds if self.device_seconds else None

    @property
    def best_validation(self) -> Row:
        """The validation with the lowest loss."""
        return min(self.validations, key=lambda row: _or_most(_number(row["validation_loss"])))


def sparkline(values: list[float], width: int) -> str:
    """A curve in at most `width` characters, each the mean of as many values as the others."""
    columns = min(width, len(values))
    edges = [n * len(values) // columns for n in range(columns + 1)] if columns else []
    pieces = [values[begin:end] for begin, end in itertools.pairwise(edges)]
    means = [math.fsum(piece) / len(piece) for piece in pieces]
    finite = [mean for mean in means if math.isfinite(mean)]
    lowest, highest = min(finite, default=0.0), max(finite, default=0.0)

    def block(mean: float) -> str:
        if not math.isfinite(mean):
            return NOT_FINITE
        height = (mean - lowest) / (highest - lowest) if highest > lowest else 0.0
        return BLOCKS[round(height * (len(BLOCKS) - 1))]

    return "".join(map(block, means))


def _number(value: object) -> float:
    return float(value) if isinstance(value, float | int) else math.nan


def _or_most(value: float) -> float:
    return value if math.isfinite(value) else math.inf
