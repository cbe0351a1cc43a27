"""Says whether a run that was killed and resumed is the run that was never stopped."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.tools.verify.measure import WEIGHT
from torchtitan.tools.verify.record import Note, Off
from torchtitan.tools.verify.report import GRAD_NORM, LOSS, relative

if TYPE_CHECKING:
    from rich.table import Table

MOMENT = 1e-3
"""How far the optimizer's state may be off on another layout, in parts of a tensor's largest."""

Ranks = Sequence[Sequence[Note]]
"""The notes of each rank of a run."""


@dataclass(frozen=True)
class Resumption:
    """A run, and one that went on from its middle after it was killed."""

    whole: Ranks
    resumed: Ranks
    half: int
    """The step that was saved."""
    is_exact: bool
    """Whether they have the same layout, so that every bit must be the same."""

    def steps(self) -> Iterator[tuple[tuple[Note, ...], tuple[Note, ...]]]:
        """What all ranks of both had, from the step that was loaded on."""
        first = self.resumed[0][0].step
        whole = [[note for note in rank if note.step >= first] for rank in self.whole]
        return zip(zip(*whole, strict=True), zip(*self.resumed, strict=True), strict=True)

    def fault(self) -> str | None:
        """What differs first; None if nothing does."""
        if (first := self.resumed[0][0].step) != self.half:
            return f"it goes on from step {first}, and step {self.half} was saved"
        for number, (whole, resumed) in enumerate(self.steps()):
            for fault in self._faults(whole, resumed, is_loaded=not number):
                return f"step {resumed[0].step}{'' if number else ', as it was loaded'}: {fault}"
        return None

    def _faults(
        self, whole: Sequence[Note], resumed: Sequence[Note], is_loaded: bool
    ) -> Iterator[str]:
        """What differs after a step, causes first: samples make the loss, and that all the rest."""
        if not is_loaded:
            yield from self._faults_of_samples(whole, resumed)
            yield from _faults_of_numbers(whole[0], resumed, self.is_exact)
        yield from _faults_of_tensors(resumed, is_exact=self.is_exact or is_loaded)
        for rank, note in enumerate(resumed):
            for name, expected in whole[0].counters.items():
                if (found := note.counters.get(name)) != expected:
                    yield f"rank {rank}: {name} is {found}, never stopped {expected}"

    def _faults_of_samples(self, whole: Sequence[Note], resumed: Sequence[Note]) -> Iterator[str]:
        expected = _samples(whole)
        for number, read in sorted(_samples(resumed).items()):
            if expected.get(number) != read:
                every = (note.samples.items() for rank in self.whole for note in rank)
                known = {has: other for samples in every for other, has in samples}
                what = f"its sample {known[read]}" if read in known else "none of it"
                yield f"where the run never stopped reads its sample {number}, {what} is read"
        if missing := expected.keys() - _samples(resumed).keys():
            yield f"sample {min(missing)} of the run was not read"

    def table(self, title: str) -> "Table":
        """A line a step, beginning with what was loaded."""
        from rich.table import Table

        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0)
        )
        for name in ("\nstep", "loss\nnever stopped", "\nresumed", "\noff", "\nsamples"):
            table.add_column(name, justify="right")
        table.add_column("tensors\noff", justify="right")
        table.add_column("\nin", overflow="fold")
        for number, (whole, resumed) in enumerate(self.steps()):
            note, expected = resumed[0], whole[0]
            farthest = max((off for n in resumed for off in n.offs), key=_far, default=None)
            read, samples = _samples(resumed), "loaded"
            if number:
                same = read == _samples(whole)
                samples = f"{min(read)}-{max(read)} " + ("same" if same else "others")
            table.add_row(
                str(note.step),
                *(_loss(expected), _loss(note)),
                _off(note.loss, expected.loss),
                samples,
                "0" if farthest is None else f"{farthest.off:.0e}",
                f"all {len(_names(resumed))}" if farthest is None else farthest.name,
            )
        return table

    def largest_loss(self) -> float:
        """How far the loss is off where it is farthest, relative."""
        pairs = ((note.loss, whole[0].loss) for whole, resumed in self.steps() for note in resumed)
        return max(relative(a, b) for a, b in pairs if a is not None and b is not None)

    def largest_weight(self) -> float:
        """How far the weight is off that is farthest."""
        offs = (off for rank in self.resumed for note in rank for off in note.offs)
        return max((off.off for off in offs if off.name.startswith("model.")), default=0.0)


def _faults_of_numbers(whole: Note, resumed: Sequence[Note], is_exact: bool) -> Iterator[str]:
    for rank, note in enumerate(resumed):
        for what, found, expected, allowed in (
            ("loss", note.loss, whole.loss, LOSS),
            ("gradient norm", note.grad_norm, whole.grad_norm, GRAD_NORM),
        ):
            if found is None or expected is None:
                continue
            if not relative(found, expected) <= (0 if is_exact else allowed):  # NaN is a fault
                yield f"rank {rank}: the {what} is {found!r}, never stopped {expected!r}"


def _faults_of_tensors(resumed: Sequence[Note], is_exact: bool) -> Iterator[str]:
    wrong: dict[str, Off] = {}
    for off in (off for note in resumed for off in note.offs):
        if is_exact or not off.off <= _allowed(off):
            wrong.setdefault(off.name, off)
    if wrong:
        first = next(iter(wrong.values()))
        where = f"[{', '.join(map(str, first.index))}]" if first.index else ""
        yield (
            f"{first.name}{where} is {first.found:.6g}, never stopped {first.expected:.6g}; "
            f"{len(wrong)} of {len(_names(resumed))} tensors differ"
        )


def _allowed(off: Off) -> float:
    if off.name.startswith("model."):
        return WEIGHT
    return MOMENT if off.name.startswith("optimizer.") else 0.0


def _far(off: Off) -> float:
    """How far off in parts of what is allowed on another layout."""
    return off.off / (_allowed(off) or 1e-9)


def _samples(notes: Sequence[Note]) -> dict[int, int]:
    return {number: read for note in notes for number, read in note.samples.items()}


def _names(notes: Sequence[Note]) -> set[str]:
    return {name for note in notes for name in note.names}


def _loss(note: Note) -> str:
    return "" if note.loss is None else f"{note.loss:.6f}"


def _off(found: float | None, expected: float | None) -> str:
    if found is None or expected is None:
        return ""
    return "0" if found == expected else f"{relative(found, expected):.0e}"
