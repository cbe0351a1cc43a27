"""Says whether two runs are the same, and if they are not, what differs first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.tools.verify.measure import ALLOWED, Step, TensorDifference

if TYPE_CHECKING:
    from rich.table import Table

LOSS, GRAD_NORM = 1e-5, 1e-4
"""Relative tolerance of losses and norms."""

Ranks = Sequence[Sequence[Step]]
"""The steps of each rank of a run."""


@dataclass(frozen=True)
class Comparison:
    """Records of one rank by step, and those of each rank of a layout."""

    one: Sequence[Step]
    ranks: Ranks

    def steps(self) -> Iterator[tuple[Step, tuple[Step, ...]]]:
        """Each step: one rank's, and those of the layout in rank order."""
        for one, *found in zip(self.one, *self.ranks, strict=True):
            yield one, tuple(found)

    def fault(self) -> str | None:
        """Return the first difference; None if there is none."""
        for one, found in self.steps():
            for fault in (*_faults_of_parameters(one, found), *_faults_of_loss(one, found)):
                return f"step {one.number}, {fault}"
        return None

    def table(self, title: str) -> "Table":
        """A line a step. Of several ranks, the numbers of the one that is farthest off."""
        headings = (
            *("\nstep", "loss\none rank", "\nlayout", "\ndiff"),
            *("norm\none rank", "\nlayout", "\ndiff", "weights\nmax diff", "\nmax diff at"),
        )
        table = empty_table(title, headings)
        for one, found in self.steps():
            cells = [str(one.number)]
            for name in ("loss", "grad_norm"):
                expected, theirs = getattr(one, name), [getattr(step, name) for step in found]
                number = max(theirs, key=lambda n: relative(n, expected))
                off = f"{relative(number, expected):.0e}"
                cells += [f"{expected:.4f}", f"{number:.4f}", off]
            table.add_row(*cells, *farthest(found, "weight"))
        return table


@dataclass(frozen=True)
class Resumption:
    """A run, and one that was resumed from its middle after it was killed."""

    whole: Ranks
    resumed: Ranks
    half: int
    """The step that was saved."""
    is_exact: bool
    """Whether they have the same layout, so that every bit must be the same."""

    def steps(self) -> Iterator[tuple[tuple[Step, ...], tuple[Step, ...]]]:
        """Records of all ranks of both runs, from the loaded step on."""
        first = self.resumed[0][0].number
        whole = [[step for step in rank if step.number >= first] for rank in self.whole]
        return zip(zip(*whole, strict=True), zip(*self.resumed, strict=True), strict=True)

    def fault(self) -> str | None:
        """Return the first difference; None if there is none."""
        if (first := self.resumed[0][0].number) != self.half:
            return f"it resumes from step {first}, but step {self.half} was saved"
        for number, (whole, resumed) in enumerate(self.steps()):
            for fault in self._faults(whole, resumed, is_loaded=not number):
                return f"step {resumed[0].number}{'' if number else ', as it was loaded'}: {fault}"
        return None

    def _faults(
        self, whole: Sequence[Step], resumed: Sequence[Step], is_loaded: bool
    ) -> Iterator[str]:
        """Yield the differences after a step, causes first: samples, loss, the rest."""
        if not is_loaded:
            yield from self._faults_of_samples(whole, resumed)
            yield from _faults_of_resumed_loss(whole[0], resumed, self.is_exact)
        yield from _faults_of_tensors(resumed, is_exact=self.is_exact or is_loaded)
        for rank, step in enumerate(resumed):
            for name, expected in whole[0].counters.items():
                if (found := step.counters.get(name)) != expected:
                    yield f"rank {rank}: {name} is {found}, uninterrupted {expected}"

    def _faults_of_samples(self, whole: Sequence[Step], resumed: Sequence[Step]) -> Iterator[str]:
        expected = _samples(whole)
        for number, read in sorted(_samples(resumed).items()):
            if expected.get(number) != read:
                every = (step.samples.items() for rank in self.whole for step in rank)
                known = {has: other for samples in every for other, has in samples}
                what = f"its sample {known[read]}" if read in known else "one that it never reads"
                yield f"the uninterrupted run reads its sample {number} where this one reads {what}"
        if missing := expected.keys() - _samples(resumed).keys():
            yield f"sample {min(missing)} of the run was not read"

    def table(self, title: str) -> "Table":
        """A line a step, beginning with what was loaded."""
        headings = ("\nstep", "loss\nuninterrupted", "\nresumed", "\ndiff", "\nsamples")
        table = empty_table(title, (*headings, "tensors\nmax diff", "\nmax diff at"))
        for number, (whole, resumed) in enumerate(self.steps()):
            step, expected = resumed[0], whole[0]
            read, samples = _samples(resumed), "loaded"
            if number:
                same = read == _samples(whole)
                samples = f"{min(read)}-{max(read)} " + ("same" if same else "others")
            cells = [str(step.number), _loss(expected), _loss(step), _off(step.loss, expected.loss)]
            table.add_row(*cells, samples, *farthest(resumed))
        return table

    def largest_loss(self) -> float:
        """Return the largest relative error of the loss."""
        pairs = ((step.loss, whole[0].loss) for whole, resumed in self.steps() for step in resumed)
        return max(relative(a, b) for a, b in pairs if a is not None and b is not None)


def empty_table(title: str, headings: Sequence[str]) -> "Table":
    """A table of numbers, with words in the last column."""
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0)
    )
    for heading in headings[:-1]:
        table.add_column(heading, justify="right")
    table.add_column(headings[-1], overflow="fold")
    return table


def farthest(found: Sequence[Step], kind: str | None = None) -> tuple[str, str]:
    """Return the largest error of a kind of tensor, relative to its tolerance, and its name."""
    differences = (d for step in found for d in step.differences if kind in (None, d.kind))
    most = max(differences, key=lambda d: d.off / ALLOWED.get(d.kind, 1e-9), default=None)
    return ("0", f"all {len(_names(found))}") if most is None else (f"{most.off:.0e}", most.name)


def largest_weight(ranks: Ranks) -> float:
    """Return the largest error of a weight."""
    differences = (d for rank in ranks for step in rank for d in step.differences)
    return max((d.off for d in differences if d.kind == "weight"), default=0.0)


def _faults_of_parameters(one: Step, found: Sequence[Step]) -> Iterator[str]:
    """The first parameter that differs, in the order of the model: by its gradient, for a weight
    may differ only because all gradients were scaled by a norm that one of them made wrong."""
    place = {name: index for index, name in enumerate(one.names)}
    for name in one.names:
        if not any(name in step.names for step in found):
            yield f"all ranks: none has {name}"
    wrong = [
        (difference.kind == "weight", place[difference.name], rank, difference)
        for rank, step in enumerate(found)
        for difference in step.differences
        if not difference.is_allowed
    ]
    if wrong:
        *_, rank, first = min(wrong, key=lambda each: each[:3])
        count = len({difference.name for *_, difference in wrong if difference.kind == first.kind})
        expected = f"on one rank {first.expected:.6g}"
        yield f"rank {rank}: {first}, {expected}; {count} of {len(place)} parameters differ"


def _faults_of_tensors(resumed: Sequence[Step], is_exact: bool) -> Iterator[str]:
    wrong: dict[str, TensorDifference] = {}
    for difference in (difference for step in resumed for difference in step.differences):
        if is_exact or not difference.is_allowed:
            wrong.setdefault(difference.name, difference)
    for first in list(wrong.values())[:1]:
        count = f"{len(wrong)} of {len(_names(resumed))} tensors differ"
        yield f"{first}, uninterrupted {first.expected:.6g}; {count}"


def _faults_of_loss(one: Step, found: Sequence[Step]) -> Iterator[str]:
    for rank, what, number, expected in _numbers_off(one, found, 1.0):
        said = f"rank {rank}: the {what} is {number:.8g}, on one rank {expected:.8g}"
        yield f"{said}; no parameter differs yet"


def _faults_of_resumed_loss(whole: Step, resumed: Sequence[Step], is_exact: bool) -> Iterator[str]:
    for rank, what, number, expected in _numbers_off(whole, resumed, 0.0 if is_exact else 1.0):
        yield f"rank {rank}: the {what} is {number!r}, uninterrupted {expected!r}"


def _numbers_off(
    one: Step, found: Sequence[Step], factor: float
) -> Iterator[tuple[int, str, float, float]]:
    """Yield (rank, what, number, expected) for errors above `factor` times the tolerance."""
    for rank, step in enumerate(found):
        for what, number, expected, allowed in (
            ("loss", step.loss, one.loss, LOSS),
            ("gradient norm", step.grad_norm, one.grad_norm, GRAD_NORM),
        ):
            if number is None or expected is None:
                continue
            if not relative(number, expected) <= factor * allowed:  # so that NaN is a fault
                yield rank, what, number, expected


def _samples(steps: Sequence[Step]) -> dict[int, int]:
    return {number: read for step in steps for number, read in step.samples.items()}


def _names(steps: Sequence[Step]) -> set[str]:
    return {name for step in steps for name in step.names}


def _loss(step: Step) -> str:
    return "" if step.loss is None else f"{step.loss:.6f}"


def _off(found: float | None, expected: float | None) -> str:
    if found is None or expected is None:
        return ""
    return "0" if found == expected else f"{relative(found, expected):.0e}"


def relative(found: float, expected: float) -> float:
    """Return the relative error of a number."""
    return abs(found - expected) / abs(expected) if expected else abs(found)
