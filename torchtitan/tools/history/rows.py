"""Reads rows of `metrics.jsonl` and of event logs, with the current names of keys."""

import json
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, Final

from torchtitan.metrics.sinks import rate_key, unit_of
from torchtitan.timeline import PHASES

Row = dict[str, Any]

OLD_NAMES: Final = {
    "agree": "sync",
    "time/agree": "time/sync",
    "slowest/agree": "slowest/sync",
    "slowest/agree_pct": "slowest/sync_pct",
    "stepped_over": "skipped_samples",
}
"""Keys of rows of older versions, and their current names."""


def parse_rows(text: bytes) -> Iterator[Row]:
    """Parse lines of JSON, with the current names of keys; incomplete lines are left out."""
    for line in text.split(b"\n"):
        try:
            row = json.loads(line) if line else None
        except ValueError:
            continue
        if isinstance(row, dict):
            yield in_tokens(renamed(row))


def in_tokens(row: Row) -> Row:
    """Add the keys of tokens to a row whose task counts something else."""
    rate = rate_key(row)
    if rate is None or rate == "tps":
        return row
    return row | {"tps": row[rate], "tokens": row[unit_of(rate)]}


def renamed(row: Row) -> Row:
    """Rename the keys of a row, and of the dictionaries in it, to the current ones."""
    return {
        OLD_NAMES.get(key, key): renamed(value) if isinstance(value, dict) else value
        for key, value in row.items()
    }


def seconds_of(reports: Iterable[tuple[Row, int]]) -> tuple[dict[str, float], dict[str, float]]:
    """Sum the seconds of each phase of a step, in order, and of each pause between steps.

    Args:
        reports: reports, each with the number of steps that it covers.
    """
    phases: dict[str, float] = {}
    pauses: dict[str, float] = {}
    for row, steps in reports:
        for key, value in row.items():
            if key.startswith("time/"):
                name = key.removeprefix("time/")
                phases[name] = phases.get(name, 0.0) + value * steps
            elif key.endswith("_s") and key != "eta_s" and isinstance(value, float):
                name = key.removesuffix("_s")
                pauses[name] = pauses.get(name, 0.0) + value
    return {name: phases[name] for name in PHASES if name in phases}, pauses


def median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def show(value: Any, spec: str) -> str:
    """Format a number, if it is known."""
    return "n/a" if value is None else format(value, spec)
