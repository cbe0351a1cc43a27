"""Whether two recipes train the same run, by their curves.

Recipes that differ only in layout or technique have the same loss in exact arithmetic, so what
tells them apart is rounding. Each update amplifies a difference, and training is chaotic: 1e-7 in
the first step may be 1e-2 after forty, although neither of the two runs is wrong. So the first
steps are compared, by the coarser dtype of computation,

    relative difference at step s <= GROWTH[dtype] s,   s = 1 ... JUDGED

and for the gradient norm NORM times as much. GROWTH is 16 unit roundoffs of float32, and 1/16 of
one of bfloat16, whose errors average out over the tokens of a batch and whose sums are float32; the
numbers were chosen by measuring (docs/compare.md). Float8 has too few bits for such a bound.
"""

from collections.abc import Sequence

from torchtitan.job import JobConfig
from torchtitan.tools.compare.results import CurveDifference, Parity, RunCurve

GROWTH = {"float32": 2.0**-20, "bfloat16": 2.0**-12}
NORM = 30.0
JUDGED = 10


def compare_curves(
    ours: RunCurve,
    theirs: RunCurve,
    our_norms: RunCurve,
    their_norms: RunCurve,
    jobs: Sequence[JobConfig],
) -> Parity:
    """Decide whether a variant trains the same run as the baseline.

    Args:
        ours, our_norms: loss and gradient norm of the variant.
        theirs, their_norms: those of the baseline.
        jobs: both recipes.
    """
    dtype = coarsest(jobs)
    if dtype is None:
        differences = (difference(ours, theirs, 0.0), difference(our_norms, their_norms, 0.0))
        why = "linears in Float8 or MXFP8 have no tolerance by dtype"
        return Parity("not judged", why, *differences)
    growth = GROWTH[dtype]
    loss = difference(ours, theirs, growth)
    norm = difference(our_norms, their_norms, NORM * growth)
    if loss is None or norm is None:
        return Parity("not judged", "they have no steps in common, or none that is finite")
    judged = [step for step in relative_differences(ours, theirs) if step <= JUDGED]
    steps = f"steps {min(judged)} to {max(judged)}"
    rule = f"{growth:.1e} a step ({dtype}; {NORM:g} times that for the norm), {steps}"
    if loss.largest <= loss.tolerance and norm.largest <= norm.tolerance:
        overall = difference(ours, theirs, 0.0)
        assert overall is not None, "what is judged is a part of all"
        later = f"; at step {overall.step} the loss is {overall.largest:.1e} off"
        return Parity("same", f"within {rule}{later}", loss, norm)
    return Parity("differs", f"more than {rule}", loss, norm)


def coarsest(jobs: Sequence[JobConfig]) -> str | None:
    """The computation dtype with the fewest bits; None if converted linears have even fewer."""
    if any(job.convert for job in jobs):
        return None
    return max((job.training.mixed_precision_param for job in jobs), key=GROWTH.__getitem__)


def difference(ours: RunCurve, theirs: RunCurve, growth: float) -> CurveDifference | None:
    """Find the largest difference relative to its tolerance; None without common steps.

    The tolerance is `growth` times the step, in the steps that are judged; if `growth` is 0,
    nothing is judged and all steps are compared.
    """
    found = [
        CurveDifference(apart, step, growth * step)
        for step, apart in relative_differences(ours, theirs).items()
        if not growth or step <= JUDGED
    ]
    return max(found, key=lambda one: one.largest / (one.tolerance or 1.0), default=None)


def relative_differences(ours: RunCurve, theirs: RunCurve) -> dict[int, float]:
    """Compute the differences by step, where both curves have a value."""
    baseline = dict(zip(theirs.steps, theirs.values, strict=True))
    return {
        step: abs(value - other) / abs(other)
        for step, value in zip(ours.steps, ours.values, strict=True)
        if value is not None and (other := baseline.get(step))
    }
