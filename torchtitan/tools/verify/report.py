"""Says whether two runs are the same, and if they are not, what differs first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.tools.verify.measure import Difference, Step

if TYPE_CHECKING:
    from rich.table import Table

LOSS, GRAD_NORM = 1e-5, 1e-4
"""How far they may be off, relative."""

HEADINGS = (
    *("\nstep", "loss\none", "\nlayout", "\noff"),
    *("norm\none", "\nlayout", "\noff", "weights\noff", "\nin"),
)


@dataclass(frozen=True)
class Comparison:
    """What one rank had in each step, and what each rank of a layout had and found."""

    one: Sequence[Step]
    ranks: Sequence[Sequence[Step]]

    def steps(self) -> Iterator[tuple[int, Step, tuple[Step, ...]]]:
        """Each step: its number, one rank's, and those of the layout in rank order."""
        for number, (one, *found) in enumerate(zip(self.one, *self.ranks, strict=True), 1):
            yield number, one, tuple(found)

    def fault(self) -> str | None:
        """What differs first; None if nothing does."""
        for number, one, found in self.steps():
            faults = [*_faults_of_parameters(one, found), *_faults_of_numbers(one, found)]
            if faults:
                return f"step {number}, {faults[0]}"
        return None

    def largest(self) -> Difference:
        """Of all weights, the one that is farthest off."""
        return max((_largest(found) for _, _, found in self.steps()), key=lambda d: d.off)

    def table(self, title: str) -> "Table":
        """A line a step. Of several ranks, the numbers of the one that is farthest off."""
        from rich.table import Table

        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0)
        )
        for name in HEADINGS[:-1]:
            table.add_column(name, justify="right")
        table.add_column(HEADINGS[-1], overflow="fold")
        for number, one, found in self.steps():
            loss = max((step.loss for step in found), key=lambda n: relative(n, one.loss))
            norm = max((s.grad_norm for s in found), key=lambda n: relative(n, one.grad_norm))
            weight = _largest(found)
            table.add_row(
                *(str(number), f"{one.loss:.4f}", f"{loss:.4f}"),
                f"{relative(loss, one.loss):.0e}",
                *(f"{one.grad_norm:.4f}", f"{norm:.4f}"),
                f"{relative(norm, one.grad_norm):.0e}",
                *(f"{weight.off:.0e}", weight.name),
            )
        return table


def _largest(found: Sequence[Step]) -> Difference:
    weights = (d for step in found for d in step.differences if d.kind == "weight")
    return max(weights, key=lambda difference: difference.off)


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
    if not wrong:
        return
    *_, rank, first = min(wrong)
    count = len({difference.name for *_, difference in wrong if difference.kind == first.kind})
    what = "gradient of " if first.kind == "gradient" else ""
    where = ", ".join(map(str, first.index))
    yield (
        f"rank {rank}: {what}{first.name}[{where}] is {first.found:.6g}, "
        f"on one rank {first.expected:.6g}; {count} of {len(place)} parameters differ"
    )


def _faults_of_numbers(one: Step, found: Sequence[Step]) -> Iterator[str]:
    for rank, step in enumerate(found):
        for what, number, expected, allowed in (
            ("loss", step.loss, one.loss, LOSS),
            ("gradient norm", step.grad_norm, one.grad_norm, GRAD_NORM),
        ):
            if not relative(number, expected) <= allowed:  # so that NaN is a fault
                yield (
                    f"rank {rank}: the {what} is {number:.8g}, on one rank {expected:.8g}; "
                    "no parameter differs yet"
                )


def relative(found: float, expected: float) -> float:
    """How far a number is off, in parts of what is expected."""
    return abs(found - expected) / abs(expected) if expected else abs(found)
