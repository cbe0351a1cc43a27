"""Finds the slowest rank in each phase from the event logs of all ranks.

`torchtitan.metrics.stragglers` defines the work of a rank, and the cost of a slow one.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchtitan.metrics.stragglers import WORK, slowest, worked
from torchtitan.timeline import PHASES, Spent
from torchtitan.tools.history import Row


class Slowest(NamedTuple):
    """The rank that was the slowest in a phase most often."""

    phase: str
    rank: int
    percent: float
    """Additional work relative to the median rank, in percent of a step; median over reports."""
    often: float
    """Share of the reports in which it was the slowest."""


def slowest_by_phase(events: Mapping[int, Sequence[Row]], stages: int = 1) -> list[Slowest]:
    """Find the slowest ranks in the events of each rank; none with one rank or one report.

    Ranks of different pipeline `stages` have different work.
    """
    logs = {rank: _reports_of_last_launch(events[rank]) for rank in sorted(events)}
    if len(logs) < 2:
        return []
    common = sorted(set.intersection(*map(set, logs.values())))[1:]
    percents: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for step in common:
        reports = [log[step] for log in logs.values()]
        work = {phase: [_seconds(phase, row) for row in reports] for phase in WORK}
        wall = statistics.fmean(
            sum(row["wall"].get(phase, 0.0) for phase in PHASES) / row["steps"] for row in reports
        )
        for one in slowest(work, wall, stages):
            percents[one.phase].append(([*logs][one.rank], one.percent))
    found = []
    for phase, each in percents.items():
        [(rank, times)] = Counter(rank for rank, _ in each).most_common(1)
        percent = statistics.median(percent for other, percent in each if other == rank)
        found.append(Slowest(phase, rank, percent, times / len(common)))
    return found


def _reports_of_last_launch(events: Sequence[Row]) -> dict[int, Row]:
    """The reports of a rank by step, since its process was last started."""
    found: dict[int, Row] = {}
    for row in events:
        if row["event"] == "start":
            # The first report comes before the event that tells of the start.
            found = {step: kept for step, kept in found.items() if step == row["step"]}
        elif row["event"] == "steps":
            found[row["step"]] = row
    return found


def _seconds(phase: str, row: Row) -> float:
    spent = Spent(row["wall"].get(phase, 0.0), row["busy"].get(phase, 0.0))
    return worked(phase, spent) / int(row["steps"])
