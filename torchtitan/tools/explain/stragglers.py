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
    rows = {rank: steps_of_last_launch(of_rank) for rank, of_rank in events.items()}
    if len(rows) < 2:
        return []
    common = sorted(set.intersection(*(set(of_rank) for of_rank in rows.values())))[1:]
    percents: defaultdict[str, defaultdict[int, list[float]]]
    percents = defaultdict(lambda: defaultdict(list))
    ranks = sorted(rows)
    for step in common:
        each = [rows[rank][step] for rank in ranks]
        seconds = {phase: [_work(phase, row) for row in each] for phase in WORK}
        whole = statistics.fmean(_step_seconds(row) for row in each)
        for one in slowest(seconds, whole, stages):
            percents[one.phase][ranks[one.rank]].append(one.percent)
    found = []
    for phase, by_rank in percents.items():
        counts = Counter({rank: len(of_rank) for rank, of_rank in by_rank.items()})
        [(rank, times)] = counts.most_common(1)
        found.append(Slowest(phase, rank, statistics.median(by_rank[rank]), times / len(common)))
    return found


def steps_of_last_launch(events: Sequence[Row]) -> dict[int, Row]:
    """The reports of a rank by step, since its process was last started."""
    found: dict[int, Row] = {}
    for row in events:
        if row["event"] == "start":
            # The first report comes before the event that tells of the start.
            found = {step: kept for step, kept in found.items() if step == row["step"]}
        elif row["event"] == "steps":
            found[row["step"]] = row
    return found


def _work(phase: str, row: Row) -> float:
    spent = Spent(row["wall"].get(phase, 0.0), row["busy"].get(phase, 0.0))
    return worked(phase, spent) / int(row["steps"])


def _step_seconds(row: Row) -> float:
    return sum(float(row["wall"].get(phase, 0.0)) for phase in PHASES) / int(row["steps"])
