"""Assignment of samples to the sources of a mixture, exact at every prefix.

Source s with the share w_s of the samples has less than one sample more or less than its share of
any prefix: |c_s(n) - n w_s| < 1 for all n. Its k-th sample, k = 0, 1, ..., may be any sample from
number floor(k / w_s) to number ceil((k + 1) / w_s) - 1. Of all samples that may be next, the one
with the earliest deadline is. A schedule within all of these windows exists, and this rule finds
one (Baruah, Cohen, Plaxton and Varvel, "Proportionate progress: a notion of fairness in resource
allocation", 1996).
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PART = 4096
"""Samples that are assigned at a time."""


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return integers in proportion to `weights`, exactly as their decimals are written."""
    exact = [Fraction(str(weight)) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * unit) for weight in exact]
    common = math.gcd(*whole) or 1
    return [weight // common for weight in whole]


class Turns(NamedTuple):
    """Assignment of some consecutive samples."""

    sources: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    """Number of each sample among those of its source."""


class MixtureSchedule:
    """Source of each sample of a mixture, and the number of the sample in that source.

    It repeats after as many samples as the sum of the weights.
    """

    def __init__(
        self, weights: Sequence[int], before: int = 0, counts: Sequence[int] | None = None
    ) -> None:
        """
        Args:
            weights: the sources' shares, in any unit; 0 for a source that is not read.
            before: number of samples that were assigned already; others are counted from there.
            counts: number of them that each source has.
        """
        self.weights, self.before = tuple(weights), before
        self.before_of = tuple(counts or (0,) * len(weights))
        self.period = sum(weights)
        self._counts = [(0,) * len(weights)]  # samples of each source before each part
        self._part = lru_cache(maxsize=64)(self._assign)

    def turn(self, number: int) -> tuple[int, int]:
        """Return the source of a sample, and its number in that source."""
        periods, rest = divmod(number, self.period)
        turns, place = self._at(rest)
        source = int(turns.sources[place])
        return source, int(turns.numbers[place]) + periods * self.weights[source]

    def counts(self, samples: int) -> list[int]:
        """Return the number of samples of each source among the first `samples`."""
        periods, rest = divmod(samples, self.period)
        whole = [periods * weight for weight in self.weights]
        if not rest:
            return whole
        turns, place = self._at(rest - 1)
        before = self._counts[(rest - 1) // PART]
        inside = np.bincount(turns.sources[: place + 1], minlength=len(whole))
        return [a + b + int(c) for a, b, c in zip(whole, before, inside, strict=True)]

    def least(self, source: int, samples: int) -> int:
        """Return a source's share of the first `samples`, rounded down: `counts` has 0 or 1 more.

        Unlike `counts`, it takes no time.
        """
        share = (self.before + samples) * self.weights[source] // self.period
        return share - self.before_of[source]

    def after(self, samples: int) -> "MixtureSchedule":
        """Return the rest of the schedule after the first `samples`."""
        counts = zip(self.before_of, self.counts(samples), strict=True)
        return MixtureSchedule(self.weights, self.before + samples, [a + b for a, b in counts])

    def _at(self, number: int) -> tuple[Turns, int]:
        part, place = divmod(number, PART)
        while part >= len(self._counts):
            self._part(len(self._counts) - 1)
        return self._part(part), place

    def _assign(self, part: int) -> Turns:
        counts = list(self._counts[part])
        first = self.before + part * PART
        sources, numbers = np.empty((2, PART), np.int64)
        ready: list[tuple[int, int]] = []  # deadline, source
        waiting = [(self._release(s, counts[s]), s) for s, w in enumerate(self.weights) if w]
        heapq.heapify(waiting)
        for place in range(PART):
            while waiting and waiting[0][0] <= first + place:
                _, source = heapq.heappop(waiting)
                heapq.heappush(ready, (self._deadline(source, counts[source]), source))
            _, source = heapq.heappop(ready)
            sources[place], numbers[place] = source, counts[source]
            counts[source] += 1
            heapq.heappush(waiting, (self._release(source, counts[source]), source))
        if part + 1 == len(self._counts):
            self._counts.append(tuple(counts))
        return Turns(sources, numbers)

    def _release(self, source: int, number: int) -> int:
        return (self.before_of[source] + number) * self.period // self.weights[source]

    def _deadline(self, source: int, number: int) -> int:
        return -(-(self.before_of[source] + number + 1) * self.period // self.weights[source])
