"""Summarizes the traces of a failed run: which rank failed, where, when, and which ranks waited.

All ranks of a group enter its collectives in the same order, so they number them alike. A rank that
has not reached the number that others wait in is the one they wait for. A rank that is waited for,
and does not wait itself, is where the failure began. If all ranks of a group wait in the same
collective, the network between them failed.
"""

import re
from collections.abc import Sequence

from torchtitan.flight_recorder.records import Collective, Group, name_ranks
from torchtitan.flight_recorder.traces import Fate, RankTrace

# Operations to which the ranks of a group may give tensors of different sizes.
UNEVEN = ("all_to_all", "gather", "scatter")
# Lines about the ranks of one fate; a large run has as many groups that wait as ranks.
MOST_LINES = 8

# What probably happened, by what is found first in this order.
CAUSES = {
    "raised": "the error above; when one rank fails, the others end too",
    "mismatch": "the ranks took different paths through the program; check what differs between "
    "them before this call: data, settings, a condition on the rank",
    "crashed": "a fault in native code, or in its arguments; gloo also aborts on tensors of "
    "unequal sizes",
    "missing": "a process did not start; see its output",
    "lost": "the system: it ran out of memory (see dmesg), the process was killed, or the "
    "machine failed",
    "stuck": "the code that this rank was running; the others waited until the timeout",
    "disconnected": "the network between these ranks failed, or one of them froze: their whole "
    "group waited in the same collective",
    "exchanging": "unknown from these traces: a rank did not reach its send or receive, or the "
    "network between the ranks failed",
    "waiting": "the ranks waited for each other: they entered different groups, or took different "
    "paths through the program",
}


def report(traces: Sequence[RankTrace]) -> list[str]:
    """Describe the failure, the ranks that waited for it, and the likely cause, a line each."""
    run = _Run(traces)
    waiting = run.lines("waiting")
    disconnected = waiting if run.is_disconnected() else []
    found = {
        "raised": run.lines("raised"),
        "mismatch": run.mismatches(),
        "crashed": run.lines("crashed"),
        "missing": run.missing(),
        "lost": run.lines("lost"),
        "stuck": run.lines("stuck"),
        "disconnected": disconnected,
        "exchanging": run.lines("exchanging"),
        "waiting": [] if disconnected else waiting,
    }
    cause = [f"likely cause: {CAUSES[kind]}" for kind, lines in found.items() if lines]
    first = [line for lines in found.values() for line in lines]
    return [*first, *run.lines("terminated"), *run.lines("done"), *cause[:1]]


def describe_rank(trace: RankTrace) -> str:
    """Describe the failure of one rank from its own trace."""
    return f"this rank {_Run([trace]).describe(trace)}"


class _Run:
    """The traces of all ranks of a run."""

    def __init__(self, traces: Sequence[RankTrace]) -> None:
        self.traces = traces
        self.by_rank = {trace.rank: trace for trace in traces}
        # The newest collective that each rank has reached, by group.
        self.reached: dict[Group, dict[int, int]] = {}
        for trace in traces:
            for c in trace.collectives:
                if not c.is_p2p:
                    self.reached.setdefault(c.group, {})[trace.rank] = c.sequence

    def lines(self, fate: Fate) -> list[str]:
        """One line for all ranks with the same description."""
        described: dict[str, list[int]] = {}
        for trace in self.traces:
            if trace.fate == fate:
                described.setdefault(self.describe(trace), []).append(trace.rank)
        lines = [f"{name_ranks(ranks)} {words}" for words, ranks in described.items()]
        rest = sum(len(ranks) for ranks in list(described.values())[MOST_LINES:])
        return [*lines[:MOST_LINES], *([f"{rest} other ranks: {fate}"] if rest else [])]

    def describe(self, trace: RankTrace) -> str:
        """Describe the end of a rank, without its number."""
        when = f"at step {trace.step}" if trace.step else "before its first step"
        if trace.kept_at:
            notes = f"the notes of its steps are gone with {trace.host}, or still there"
            when = f"at an unknown step ({notes})"
        failure, waiting, last = trace.failure, trace.waiting, trace.last_finished
        error = failure.error if failure else ""
        where = f", in {failure.place}" if failure and failure.place else ""
        ended = f"; its last collective, {last}, had finished" if last else ""
        match trace.fate:
            case "done":
                error_of_all = (
                    "" if trace.state == "finished" else " with an error that all ranks raised"
                )
                return f"finished {when}{error_of_all}"
            case "terminated":
                return f"was terminated {when}{where}"
            case "raised":
                return f"raised {error} {when}{where}"
            case "crashed":
                return f"crashed {when}: {trace.crash}"
            case "lost":
                return f"{self._loss()} {when} and left no message"
            case "stuck":
                return f"hung {when} outside communication{where}{ended}"
            case "exchanging":
                return f"waited {when} in a send or receive{where} (gloo keeps no record of these)"
            case "waiting":
                assert waiting is not None
                return f"waited {when} in {self._wait(trace, waiting)}"

    def _wait(self, trace: RankTrace, c: Collective) -> str:
        absent = self._absent(trace.rank, c)
        # Several may be in progress; the one that an absent rank would reach next holds them up.
        come = [self.reached.get(c.group, {}).get(rank) for rank in absent]
        if known := [number for number in come if number is not None]:
            first = (min(known) + 1, c.group, c.is_p2p)
            held = (o for o in trace.collectives if (o.sequence, o.group, o.is_p2p) == first)
            c = next(held, c)
        given = f" of {c.tensors}" if c.tensors else ""
        for_whom = f" for {name_ranks(absent)}" if absent and len(self.traces) > 1 else ""
        at = f", called at {c.caller}" if c.caller else ""
        return f"{c}{given}{for_whom}{at}"

    def _absent(self, rank: int, c: Collective) -> list[int]:
        """The ranks that have not reached a collective in which `rank` waits."""
        if c.is_p2p:
            return [other for other in self._parties(c) if other != rank]
        reached = self.reached.get(c.group, {})
        members = c.group.ranks or tuple(reached)
        return [other for other in members if other != rank and reached.get(other, 0) < c.sequence]

    def is_disconnected(self) -> bool:
        """Whether all ranks of a group, or a sender and its receiver, wait for each other."""
        waiting: dict[tuple[Group, bool, tuple[int, ...]], int] = {}
        for c in (trace.waiting for trace in self.traces if trace.waiting):
            call = (c.group, c.is_p2p, self._parties(c))
            waiting[call] = waiting.get(call, 0) + 1
        return any(len(parties) == count > 1 for (_, _, parties), count in waiting.items())

    def _parties(self, c: Collective) -> tuple[int, ...]:
        """The ranks that take part in a collective, or sender and receiver."""
        if not c.is_p2p:
            return c.group.ranks
        pair = [int(number) for number in re.findall(r"\d+", c.carried_out)]
        pair = pair if c.operation.startswith("send") else pair[::-1]
        return tuple(c.group.ranks[at] for at in pair if at < len(c.group.ranks))

    def _loss(self) -> str:
        """Infer from the errors of the other ranks why a rank left no message."""
        if any(trace.fate == "raised" for trace in self.traces):
            return "was ended by the launcher, as all ranks are when one fails,"
        errors = " ".join(trace.failure.error for trace in self.traces if trace.failure)
        if re.search("closed|reset", errors):
            return "was killed from outside"
        if re.search("timed? ?out", errors, re.IGNORECASE):
            return "stopped responding (frozen, or disconnected)"
        return "died or froze"

    def missing(self) -> list[str]:
        """The ranks that left nothing at all."""
        size = max([0, *(trace.world_size for trace in self.traces)])
        missing = [rank for rank in range(size) if rank not in self.by_rank]
        why = "left no traces: never started, or wrote to another disk"
        return [f"{name_ranks(missing)} {why}"] if missing else []

    def mismatches(self) -> list[str]:
        """The first collective of each group that its ranks called with different arguments."""
        calls: dict[Group, dict[int, dict[str, list[int]]]] = {}
        for trace in self.traces:
            for c in trace.collectives:
                if not c.is_p2p:
                    is_even = bool(c.tensors) and not c.operation.startswith(UNEVEN)
                    call = f"{c.operation} of {c.tensors}" if is_even else c.operation
                    numbered = calls.setdefault(c.group, {}).setdefault(c.sequence, {})
                    numbered.setdefault(call, []).append(trace.rank)
        lines = []
        for group, numbers in calls.items():
            if different := [number for number, called in numbers.items() if len(called) > 1]:
                called = numbers[first := min(different)].items()
                step = max(self.by_rank[rank].step for _, ranks in called for rank in ranks)
                who = ", ".join(f"{name_ranks(ranks)} {call}" for call, ranks in called)
                lines.append(f"#{first} on {group} differs at step {step}: {who}")
        return lines
