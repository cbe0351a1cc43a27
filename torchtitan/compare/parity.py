"""Whether two recipes train the same run, by their curves.

Recipes that differ only in layout or technique have the same loss in exact arithmetic, so what
tells them apart is rounding. A step's loss is a mean over thousands of tokens, whose errors mostly
cancel; each update carries the difference on, and it grows with the steps. So the tolerance at step
s is a number of unit roundoffs u of the coarser of the two dtypes of computation,

    relative difference <= GROWTH u s,   at most LARGEST

and for the gradient norm NORM times as much. GROWTH was chosen by measuring (docs/compare.md).
A dtype with so few bits as Float8 has no such bound; then, and wherever the study has seeds, the
yardstick is what chance alone does: how far the baseline with other seeds is from itself.
"""

import statistics
from collections.abc import Sequence

from torchtitan.compare.report import Curve, Difference, Parity
from torchtitan.job import JobConfig

ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
GROWTH = 16.0
LARGEST = {"float32": 1e-3, "bfloat16": 1e-2}
NORM = 10.0
LAST = 3
"""The mean over the last such part of the steps is compared with other seeds."""


def judge(
    ours: Curve,
    theirs: Curve,
    our_norms: Curve,
    their_norms: Curve,
    jobs: Sequence[JobConfig],
    others: Sequence[Curve],
) -> Parity:
    """The verdict on a variant.

    Args:
        ours, our_norms: loss and gradient norm of the variant.
        theirs, their_norms: of the baseline.
        jobs: both recipes.
        others: the loss of the baseline with other seeds.
    """
    dtype = coarsest(jobs)
    if dtype is None:
        differences = (difference(ours, theirs, 0.0, 0.0), difference(our_norms, their_norms, 0, 0))
        if not others:
            why = "linears in Float8 or MXFP8 have no tolerance by dtype; give the study seeds"
            return Parity("not judged", why, *differences)
        return _by_seeds(ours, theirs, others, differences)
    growth, largest = GROWTH * ROUNDOFF[dtype], LARGEST[dtype]
    loss = difference(ours, theirs, growth, largest)
    norm = difference(our_norms, their_norms, NORM * growth, NORM * largest)
    if loss is None or norm is None:
        return Parity("not judged", "they have no steps in common, or none that is finite")
    rule = f"{GROWTH:g} unit roundoffs of {dtype} a step, at most {largest:g}"
    if loss.largest <= loss.tolerance and norm.largest <= norm.tolerance:
        return Parity("same", f"within {rule}; {NORM:g} times that for the norm", loss, norm)
    if others:
        return _by_seeds(ours, theirs, others, (loss, norm))
    return Parity("differs", f"more than {rule}", loss, norm)


def coarsest(jobs: Sequence[JobConfig]) -> str | None:
    """The dtype of computation with the fewest bits; None where some linears have fewer still."""
    if any(job.convert for job in jobs):
        return None
    return max((job.training.mixed_precision_param for job in jobs), key=ROUNDOFF.__getitem__)


def difference(ours: Curve, theirs: Curve, growth: float, largest: float) -> Difference | None:
    """Where two curves are farthest apart, by what is allowed there; None: nothing in common.

    Allowed is `growth` a step, at most `largest`.
    """
    baseline = dict(zip(theirs.steps, theirs.values, strict=True))
    found: list[tuple[float, Difference]] = []
    for step, value in zip(ours.steps, ours.values, strict=True):
        other = baseline.get(step)
        if value is None or not other:
            continue
        apart, allowed = abs(value - other) / abs(other), min(growth * step, largest)
        found.append((apart / allowed if allowed else apart, Difference(apart, step, allowed)))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _by_seeds(
    ours: Curve,
    theirs: Curve,
    others: Sequence[Curve],
    differences: tuple[Difference | None, Difference | None],
) -> Parity:
    ends = [end for end in map(_end, (theirs, *others)) if end is not None]
    mine = _end(ours)
    if mine is None or len(ends) < 2:
        return Parity("not judged", "a loss at the end is not finite", *differences)
    low, high = min(ends), max(ends)
    apart, chance = abs(mine - ends[0]), high - low
    rule = (
        f"the mean loss of the last third is {apart:.4f} from the baseline's, and {len(ends)} "
        f"seeds of it lie within {chance:.4f}"
    )
    return Parity("within seeds" if apart <= chance else "differs", rule, *differences)


def _end(curve: Curve) -> float | None:
    last = curve.values[-max(len(curve.values) // LAST, 1) :]
    finite = [value for value in last if value is not None]
    return statistics.fmean(finite) if len(finite) == len(last) and last else None
