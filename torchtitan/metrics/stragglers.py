"""The rank that all others wait for: which it is, in which phase, and what it costs.

Ranks are kept in step by their collectives, so that what a step takes tells none apart. What a rank
works does: of the phases without a collective it is the time that goes by, of the others, on a CPU,
the processor time of its thread. On CUDA there is no such time, and a rank that is slow in its
forward or backward shows in a trace alone (`torchtitan profile`).

What a straggler costs is what it works longer than the median rank, as a share of the step: to be
twice as slow in a phase that takes no time is nothing to tell of.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from torchtitan.timeline import Spent

WORK: Final = ("data", "forward", "backward", "optimizer")
"""Phases in which ranks differ by what they do."""
ALONE: Final = ("data",)
"""In these no rank waits for another, but perhaps for a disk."""

# Reports in a row: one may be chance.
IN_A_ROW = 3


class Straggler(NamedTuple):
    """The slowest rank in a phase."""

    phase: str
    rank: int
    seconds: float
    """In which it worked longer than the median rank, a step."""
    percent: float
    """The same, of the time of a step."""


def worked(phase: str, spent: Spent) -> float:
    """Seconds of a phase in which the rank itself was what took time."""
    return spent.wall if phase in ALONE else spent.busy


def slowest(seconds: Mapping[str, Sequence[float]], step_seconds: float) -> list[Straggler]:
    """Of each phase the rank that worked longest, from the seconds a step of all ranks."""
    found = []
    for phase, of_ranks in seconds.items():
        longest = max(of_ranks)
        late = longest - statistics.median_low(of_ranks)
        percent = 100 * late / step_seconds if step_seconds else 0.0
        found.append(Straggler(phase, of_ranks.index(longest), late, percent))
    return found


class StragglerWatch:
    """Tells of a rank that is slowest in a phase, report after report."""

    def __init__(self, limit: float) -> None:
        """`limit` in percent of a step, 0: never."""
        self.limit = limit
        self._in_a_row: dict[tuple[str, int], int] = {}

    def look(self, seconds: Mapping[str, Sequence[float]], step_seconds: float) -> list[Straggler]:
        """The stragglers that are to be told of, once each until they catch up."""
        late = [one for one in slowest(seconds, step_seconds) if 0 < self.limit < one.percent]
        before, self._in_a_row = self._in_a_row, {}
        for one in late:
            key = one.phase, one.rank
            self._in_a_row[key] = before.get(key, 0) + 1
        return [one for one in late if self._in_a_row[one.phase, one.rank] == IN_A_ROW]
