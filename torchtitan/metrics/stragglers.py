"""Finds stragglers: the rank that all others wait for, the phase, and the cost.

Ranks are kept in step by their collectives, so the time of a step is the same on all of them. Their
own work differs: the elapsed time in phases without a collective, and the processor time of the
thread in the others, on a CPU. On CUDA there is no such time, and only a trace shows a rank that is
slow in its forward or backward (`torchtitan profile`).

The cost of a straggler is its additional work relative to the median rank, as a share of the step:
it does not matter that a rank is twice as slow in a phase that takes no time.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from torchtitan.timeline import Spent

WORK: Final = ("data", "forward", "backward", "optimizer")
"""Phases in which ranks differ by what they do."""
ALONE: Final = ("data",)
"""Phases in which no rank waits for another, but perhaps for a disk."""

# Reports in a row: one may be chance.
CONSECUTIVE_REPORTS = 3


class Straggler(NamedTuple):
    """The slowest rank in a phase."""

    phase: str
    rank: int
    seconds: float
    """Additional seconds of work in a step relative to the median rank of its stage."""
    percent: float
    """Additional work in percent of a step."""


def busy_seconds(phase: str, spent: Spent) -> float:
    """Seconds of a phase that the rank itself worked."""
    return spent.wall if phase in ALONE else spent.busy


class StragglerWatch:
    """Detector of a rank that is the slowest in a phase in several reports in a row."""

    def __init__(self, limit: float, stages: int = 1) -> None:
        """`limit` is in percent of a step, 0: never; `stages` is the number of pipeline stages."""
        self.limit, self.stages = limit, stages
        self._in_a_row: dict[tuple[str, int], int] = {}

    def slowest(
        self, seconds: Mapping[str, Sequence[float]], step_seconds: float
    ) -> list[Straggler]:
        """Find the rank that worked longest in each phase, from the seconds a step of all ranks.

        Stages of a pipeline have different work, so a rank is compared with those of its own: with
        several of them, that many equal parts of the ranks, in order. All read data alike.
        """
        found = []
        for phase, of_ranks in seconds.items():
            size = len(of_ranks) if phase in ALONE else len(of_ranks) // self.stages
            if size < 2:
                continue
            parts = (of_ranks[begin : begin + size] for begin in range(0, len(of_ranks), size))
            usual = [statistics.median_low(part) for part in parts]
            late = [own - usual[rank // size] for rank, own in enumerate(of_ranks)]
            percent = 100 * max(late) / step_seconds if step_seconds else 0.0
            found.append(Straggler(phase, late.index(max(late)), max(late), percent))
        return found

    def look(self, found: Sequence[Straggler]) -> list[Straggler]:
        """Select the stragglers to report, each once until it has caught up."""
        late = [one for one in found if 0 < self.limit < one.percent]
        before, self._in_a_row = self._in_a_row, {}
        for one in late:
            key = one.phase, one.rank
            self._in_a_row[key] = before.get(key, 0) + 1
        return [one for one in late if self._in_a_row[one.phase, one.rank] == CONSECUTIVE_REPORTS]
