"""The order in which a pipeline's ranks work on their stages and microbatches.

A schedule is, for each rank, a list of actions, each on one stage and one microbatch: F, forward;
B, backward; or a backward in two: I, the gradients of the stage's input, which the previous stage
waits for, and W, those of its weights, which no stage waits for and which can fill a gap.

    GPipe                  all forwards, then all backwards (arXiv:1811.06965)
    1F1B                   forwards and backwards in turn, so that fewer activations are kept
                           (arXiv:2104.04473)
    Interleaved1F1B        the same with several stages per rank: shorter gaps (the same paper)
    LoopedBFS              several stages per rank, all microbatches of one before the next
                           (arXiv:2211.05953)
    InterleavedZeroBubble  several stages per rank, backwards in two (ZB1P, arXiv:2401.10241)
    ZBVZeroBubble          two stages per rank in the shape of a V, backwards in two (the same)
    DualPipeV              also a V, forwards paired with backwards (arXiv:2412.19437)

The lists of actions are torch's. This module has the schedules' requirements and simulates them.
"""

import csv
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast

from torchtitan.config import ConfigError, local_path, show
from torchtitan.remote import refuse_pointer
from torchtitan.torch_private.pipeline_stages import pipeline_order

Kind = Literal["F", "B", "I", "W"]

TIME: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Duration of each kind of action, in forwards of one stage."""


class Action(NamedTuple):
    """Step of a rank's schedule: a forward or backward of one microbatch on one stage."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Slot(NamedTuple):
    """Action with its start and end times, in forwards of one stage unless durations are given."""

    rank: int
    action: Action
    start: float
    end: float


Orders = dict[int, list[Action]]
"""Actions of each rank, in order."""


@dataclass(frozen=True)
class Schedule:
    """Requirements of a schedule."""

    stages: Literal["one", "two", "several"]
    """Number of stages on each rank; several: two or more."""
    is_v: bool = False
    """Whether a rank's second stage mirrors its first, instead of following one lap later."""
    splits_backward: bool = False
    needs_full: bool = False
    """Whether there must be at least as many microbatches as stages."""
    in_rounds: bool = False
    """Whether microbatches must divide into equal rounds of about as many as there are ranks."""

    def fits(self, stages: int, pp: int) -> bool:
        """Whether the schedule supports this number of stages on `pp` ranks."""
        each, rest = divmod(stages, pp)
        return not rest and {"one": each == 1, "two": each == 2, "several": each >= 2}[self.stages]

    def runs(self, microbatches: int, stages: int, pp: int) -> bool:
        """Whether the schedule supports this number of microbatches."""
        if self.needs_full and microbatches < stages:
            return False
        return not self.in_rounds or microbatches % max(1, microbatches // pp) == 0

    def ranks(self, stages: int, pp: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        return tuple(
            pp - 1 - stage % pp if self.is_v and stage // pp % 2 else stage % pp
            for stage in range(stages)
        )


SCHEDULES: dict[str, Schedule] = {
    "GPipe": Schedule("one"),
    "1F1B": Schedule("one", needs_full=True),
    "Interleaved1F1B": Schedule("several", in_rounds=True),
    "LoopedBFS": Schedule("several"),
    "InterleavedZeroBubble": Schedule("several", splits_backward=True, in_rounds=True),
    "ZBVZeroBubble": Schedule("two", is_v=True, splits_backward=True),
    "DualPipeV": Schedule("two", is_v=True, splits_backward=True, needs_full=True),
}


def order(name: str, stages: int, pp: int, microbatches: int) -> Orders:
    """Return the actions of a supported schedule; importing torch's schedules takes seconds."""
    if SCHEDULES[name].stages == "one":
        # Torch's list for 1F1B, which torch never runs, counts the last rank's forwards from 1.
        return {rank: list(_alternate(name, rank, pp, microbatches)) for rank in range(pp)}
    rows = pipeline_order(name, stages, pp, microbatches)
    return {rank: [action for cell in row for action in parse(cell)] for rank, row in rows.items()}


def _alternate(name: str, rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """Yield warm-up forwards, then alternate forwards and backwards until both are exhausted."""
    ahead = microbatches if name == "GPipe" else min(pp - 1 - rank, microbatches)
    yield from (Action(rank, "F", microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        if ahead + microbatch < microbatches:
            yield Action(rank, "F", ahead + microbatch)
        yield Action(rank, "B", microbatch)


def parse(cell: str) -> list[Action]:
    """Parse a cell of a CSV schedule: `2F0`, empty, or a pair `(0F4;3B1)OVERLAP_F_B`.

    Raises:
        ConfigError: if the cell is anything else.
    """
    pair = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell.strip())
    found = []
    for part in pair[1].split(";") if pair else [cell]:
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", part.strip())
        if match:
            found.append(Action(int(match[1]), cast(Kind, match[2]), int(match[3])))
        elif part.strip():
            raise ConfigError(
                f"{show(part.strip())} is not an action; wanted stage, F, B, I or W, and "
                "microbatch, as in 2F0"
            )
    return found


def timeline(
    orders: Orders,
    durations: Mapping[Action, float] | None = None,
    rests: Mapping[Action, float] | None = None,
    sending: float = 0,
) -> list[Slot]:
    """Compute when each action runs, as `simulate` does; the orders must not deadlock."""
    slots, stuck = simulate(orders, durations, rests, sending)
    assert not stuck, f"an order that deadlocks: {stuck}"
    return slots


def bubble(slots: Sequence[Slot]) -> float:
    """Return the fraction of time that the ranks are idle, from 0 to 1.

    (pp - 1) / (microbatches + pp - 1) for GPipe and 1F1B; less for the others.
    """
    ranks = {slot.rank for slot in slots}
    busy = sum(slot.end - slot.start for slot in slots)
    return 1 - busy / (len(ranks) * max(slot.end for slot in slots))


def forward_steps(ranks: Sequence[int], microbatches: int) -> Iterator[dict[int, Action]]:
    """Yield each rank's action in each step of a forward-only pass over the stages on `ranks`.

    A rank runs the latest stage whose input it has, so few microbatches are in flight.
    """
    done = [0] * len(ranks)  # microbatches by stage
    while done[-1] < microbatches:
        step: dict[int, Action] = {}
        for stage, rank in reversed(list(enumerate(ranks))):
            arrived = done[stage - 1] if stage else microbatches
            if rank not in step and done[stage] < arrived:
                step[rank] = Action(stage, "F", done[stage])
        yield step
        for stage, _, _ in step.values():
            done[stage] += 1


def simulate(
    orders: Orders,
    durations: Mapping[Action, float] | None = None,
    rests: Mapping[Action, float] | None = None,
    sending: float = 0,
) -> tuple[list[Slot], dict[int, Action]]:
    """Return the slots of all actions that can run, and the next action of each blocked rank.

    Args:
        durations: duration of each action; None: all stages take equal time.
        rests: time that a rank still takes after an action whose result it has sent.
        sending: duration of a message from one rank to another.
    """
    owner = {action.stage: rank for rank, actions in orders.items() for action in actions}
    last = max(owner)
    waiting = {rank: deque(actions) for rank, actions in orders.items()}
    clock: dict[int, float] = dict.fromkeys(orders, 0)
    ended: dict[Action, float] = {}
    slots = []
    moved = True
    while moved:
        moved = False
        for rank, actions in waiting.items():
            while actions and all(need in ended for need in _needs(actions[0], last)):
                action = actions.popleft()
                needs = _needs(action, last)
                arrived = (ended[n] + sending * (owner[n.stage] != rank) for n in needs)
                start = max([clock[rank], *arrived])
                clock[rank] = start + (durations[action] if durations else TIME[action.kind])
                slots.append(Slot(rank, action, start, clock[rank]))
                ended[action] = clock[rank]
                if action.kind == "B":  # includes its first half
                    ended[action._replace(kind="I")] = clock[rank]
                clock[rank] += rests[action] if rests else 0
                moved = True
    return slots, {rank: actions[0] for rank, actions in waiting.items() if actions}


def _needs(action: Action, last: int) -> list[Action]:
    """Return the actions, on any rank, that must precede `action`."""
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    after = [Action(stage + 1, "I", microbatch)] if stage < last else []
    return [Action(stage, "F", microbatch), *after]


def read(path: str | Path) -> Orders:
    """Read a schedule from a file with one row per rank.

    Raises:
        ConfigError: if it cannot be read, or a cell is not an action.
    """
    file = local_path(str(path))
    try:
        refuse_pointer(file)
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.reader(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"it cannot be read: {error}") from None
    orders: Orders = {}
    for rank, row in enumerate(rows):
        orders[rank] = []
        for column, cell in enumerate(row):
            try:
                orders[rank] += parse(cell)
            except ConfigError as error:
                raise ConfigError(f"row {rank + 1}, column {column + 1}: {error}") from None
    return orders


def ranks(orders: Orders) -> tuple[int, ...]:
    """Return the rank of each stage of a valid schedule."""
    owner = {action.stage: rank for rank, actions in orders.items() for action in actions}
    return tuple(owner[stage] for stage in range(len(owner)))


def order_problems(orders: Orders, pp: int, microbatches: int) -> Iterator[str]:
    """Yield the reasons why `pp` ranks cannot run a schedule; only its first kind of fault."""
    if len(orders) != pp:
        yield f"it has {len(orders)} rows; wanted {pp}, one for each rank of the pipeline"
        return
    if idle := [rank for rank, actions in orders.items() if not actions]:
        yield f"rank {idle[0]} has no stage; wanted at least one for each rank"
        return
    found = list(_faults_of_stages(orders, microbatches))
    yield from found
    if not found and (stuck := simulate(orders)[1]):
        rank, action = next(iter(stuck.items()))
        yield (
            f"rank {rank} would wait forever for {action}; wanted an order in which its inputs "
            "arrive first"
        )


def _faults_of_stages(orders: Orders, microbatches: int) -> Iterator[str]:
    actions = [action for actions in orders.values() for action in actions]
    stages, numbers = {action.stage for action in actions}, {a.microbatch for a in actions}
    if stages != set(range(len(stages))):
        yield f"it has the stages {_list(stages)}; wanted all of 0 to {max(stages)}"
        return
    if numbers != set(range(microbatches)):
        yield (
            f"it has {len(numbers)} microbatches, {min(numbers)} to {max(numbers)}, but a batch "
            f"has {microbatches}; wanted 0 to {microbatches - 1}"
        )
        return
    ranks: dict[int, set[int]] = {stage: set() for stage in stages}
    kinds = {(stage, number): "" for stage in stages for number in numbers}
    for rank, (stage, kind, number) in ((r, a) for r, row in orders.items() for a in row):
        ranks[stage].add(rank)
        kinds[stage, number] += kind
    for stage, where in ranks.items():
        if len(where) > 1:
            yield f"stage {stage} is on ranks {_list(where)}; wanted it on one rank"
    for (stage, number), done in kinds.items():
        if "".join(sorted(done)) not in ("BF", "FIW"):
            yield (
                f"stage {stage} does {' '.join(done) or 'nothing'} for microbatch {number}; "
                "wanted F and either B or I and W"
            )
            return


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
