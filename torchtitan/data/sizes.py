"""Sizes of the steps of a run, which its stages of training may change."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class StepSizes(NamedTuple):
    """Sizes of steps, from one on."""

    start: int
    """Number of steps before them."""
    global_batch: int
    seq_len: int


def tokens_before(step: int, sizes: Sequence[StepSizes]) -> int:
    """Return the number of tokens in the first `step` steps of a run."""
    ends = [each.start for each in sizes[1:]] + [step]
    return sum(
        max(0, min(end, step) - each.start) * each.global_batch * each.seq_len
        for each, end in zip(sizes, ends, strict=True)
    )


def least_lanes(sizes: Sequence[StepSizes]) -> int:
    """Return the smallest number of lanes that every global batch divides."""
    return math.lcm(*(each.global_batch for each in sizes))
