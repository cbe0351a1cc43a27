"""Sets of moments, represented as sorted intervals that do not touch."""

from collections.abc import Iterable

Interval = tuple[float, float]
Intervals = list[Interval]
"""Sorted and separate intervals, each of which ends after it begins."""


def union(intervals: Iterable[Interval]) -> Intervals:
    """All moments that are in any of `intervals`, which may be in any order."""
    joined: Intervals = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def without(these: Intervals, others: Intervals) -> Intervals:
    """The moments of `these` that are in none of `others`."""
    left: Intervals = []
    at = 0
    for begin, end in these:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        reached, other = begin, at
        while other < len(others) and others[other][0] < end:
            if others[other][0] > reached:
                left.append((reached, others[other][0]))
            reached = max(reached, others[other][1])
            other += 1
        if reached < end:
            left.append((reached, end))
    return left


def within(these: Intervals, others: Intervals) -> Intervals:
    """The moments that are in both sets."""
    return without(these, without(these, others))


def length(intervals: Intervals) -> float:
    """The total length of intervals."""
    return sum(end - begin for begin, end in intervals)
