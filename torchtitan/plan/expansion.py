"""A whole step from a recording in which repeated work was recorded a few times.

A recording is cut at its marks into segments. Blocks of a kind, microbatches and accumulated
batches repeat, so the segments of one that was recorded stand for those that were not: what a
segment computes, sends and adds to the memory is the same each time.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchtitan.parallel.schedules import Action
from torchtitan.plan.fake_rank import GATHER, NEIGHBOR, RankRecording
from torchtitan.plan.recording import DISPATCH, Change, Event, Kernel, Mark, Message, StorageRecord


@dataclass(frozen=True)
class StepSegment:
    """Events of a recording from one mark to the next."""

    name: str
    """Name of the mark at its start."""
    block: str
    """Block of the model that it belongs to; "": none."""
    events: Sequence[Event]

    @cached_property
    def kernels(self) -> list[Kernel]:
        """Kernels in the order of their issue."""
        return [each for each in self.events if isinstance(each, Kernel) and each != DISPATCH]

    @cached_property
    def messages(self) -> list[Message]:
        """Messages in the order of their issue."""
        return [event for event in self.events if isinstance(event, Message)]


@dataclass(frozen=True)
class StepPart:
    """Part of a step: an action of a pipeline rank, or what is between two of them."""

    action: Action | None
    """Forward or backward; without a pipeline the microbatch is the accumulated batch."""
    segments: Sequence[StepSegment]


@dataclass(frozen=True)
class RankStep:
    """All segments of a step of a rank, in the order in which the host issues them."""

    source: RankRecording
    before: StepSegment
    """State before the step: parameters, buffers, optimizer states."""
    parts: Sequence[StepPart]
    """Parts of repeated work have the same segments, as the same objects."""

    @cached_property
    def segments(self) -> Sequence[StepSegment]:
        """Segments of all parts."""
        return [segment for part in self.parts for segment in part.segments]

    def levels(
        self, kind: Callable[[StorageRecord], str] = lambda record: record.kind or "temporary"
    ) -> Iterator[tuple[StepSegment, Counter[str]]]:
        """Yield each segment with the bytes by kind at the moment in it that holds the most.

        Host memory counts on a CPU only.
        """
        records, on_cpu = self.source.recording.storages, self.source.device_type == "cpu"
        of_records = [kind(record) for record in records]
        names = sorted({*of_records})
        number = {name: index for index, name in enumerate(names)}
        kinds = [
            number[name] if on_cpu or not record.on_host else None
            for name, record in zip(of_records, records, strict=True)
        ]
        for segment, level in self._levels(kinds, len(names)):
            yield segment, Counter(dict(zip(names, level, strict=True)))

    def _levels(
        self, kinds: Sequence[int | None], count: int
    ) -> Iterator[tuple[StepSegment, list[int]]]:
        """Yield each segment with the bytes of `count` kinds at the moment that holds the most."""
        now = [0] * count
        profiles: dict[int, tuple[list[int], list[int]]] = {}
        for segment in (self.before, *self.segments):
            if id(segment) not in profiles:
                profiles[id(segment)] = _profile(segment, kinds, count)
            peak, net = profiles[id(segment)]
            yield segment, [a + b for a, b in zip(now, peak, strict=True)]
            now = [a + b for a, b in zip(now, net, strict=True)]

    def peak(self) -> tuple[str, Counter[str]]:
        """Return the name of the segment that holds the most, and its bytes by kind."""
        segment, level = max(self.levels(), key=lambda each: each[1].total())
        return segment.name, level

    def activations(self) -> Counter[str]:
        """Return the bytes of activations at that moment, by the operators that made them."""

        def kind(record: StorageRecord) -> str:
            return _maker(record.allocated_by) if record.kind == "activations" else ""

        _, level = max(self.levels(kind), key=lambda each: each[1].total())
        return Counter({name: size for name, size in level.items() if name and size})

    def host_bytes(self) -> int:
        """Return the most bytes that are in host memory at a time, of a step on a device."""
        records = self.source.recording.storages
        if not any(record.on_host for record in records):
            return 0
        where = [0 if record.on_host else None for record in records]
        return max(level for _, [level] in self._levels(where, 1))


def expand(source: RankRecording, passes: int) -> RankStep:
    """Return the whole step, of `passes` accumulated batches."""
    before, *segments = _cut(source.recording.events)
    start = "pipeline" if any(segment.name == "pipeline" for segment in segments) else "forward"
    starts = [i for i, segment in enumerate(segments) if segment.name == start]
    end = next(i for i, segment in enumerate(segments) if segment.name == "norm")
    each = [segments[a:b] for a, b in itertools.pairwise([*starts, end])]
    if passes > len(each) > 2:
        each[-2:-1] = [each[-2]] * (passes - len(each) + 1)
    parts = [StepPart(None, segments[: starts[0]])]
    for number, one in enumerate(each):
        parts += _of_pipeline(source, one) if source.pipeline else _of_pass(source, one, number)
    return RankStep(source, before, [*parts, StepPart(None, _with_all(source, segments[end:]))])


def _of_pass(
    source: RankRecording, segments: Sequence[StepSegment], number: int
) -> Iterator[StepPart]:
    """Yield the forward and the backward of an accumulated batch."""
    backward = next(i for i, each in enumerate(segments) if each.name == "backward")
    yield StepPart(Action(0, "F", number), _with_all(source, segments[:backward]))
    yield StepPart(Action(0, "B", number), _with_all(source, segments[backward:]))


def _of_pipeline(source: RankRecording, segments: Sequence[StepSegment]) -> Iterator[StepPart]:
    """Yield all actions of a pass through a pipeline."""
    assert source.pipeline is not None
    # Microbatches that one stage needs are recorded of all stages.
    names = {str(action): action for row in source.pipeline.orders.values() for action in row}
    starts = [i for i, each in enumerate(segments) if each.name in names]
    end = next(i for i, each in enumerate(segments) if each.name == "end of pipeline")
    bounds = itertools.pairwise([*starts, end])
    recorded, gathers = {}, {}
    for a, b in bounds:
        action = names[segments[a].name]
        own, gathered = list[StepSegment](), list[StepSegment]()
        for each in segments[a:b]:
            if each.name != NEIGHBOR:
                (gathered if each.name.startswith(GATHER) else own).append(each)
        recorded[action], gathers[action] = _with_all(source, own), _with_all(source, gathered)
    yield StepPart(None, _with_all(source, segments[: starts[0]]))
    for action in source.pipeline.actions:
        one = source.pipeline.recorded[action]
        # Gathers are of a stage, so they follow the first of the actions that one stands for.
        yield StepPart(action, [*recorded[one], *gathers.pop(one, [])])
    yield StepPart(None, _with_all(source, segments[end:]))


def _maker(operator: str) -> str:
    """Return the kind of an operator."""
    if "attention" in operator:
        return "attention"
    if operator.endswith("mm"):
        return "products"
    return "norms" if "_norm" in operator else "elementwise"


def _cut(events: Sequence[Event]) -> list[StepSegment]:
    starts = [i for i, event in enumerate(events) if isinstance(event, Mark)]
    marks = [Mark(""), *(events[i] for i in starts)]
    bounds = itertools.pairwise([0, *starts, len(events)])
    return [
        StepSegment(mark.name, mark.block, events[a:b])  # type: ignore[union-attr]
        for mark, (a, b) in zip(marks, bounds, strict=True)
    ]


def _with_all(source: RankRecording, segments: Sequence[StepSegment]) -> list[StepSegment]:
    """Repeat the segments of sample blocks for the blocks that they stand for."""
    found: list[StepSegment] = []
    samples = {name: each for each in source.blocks for name in each.sample}
    for blocks, group in itertools.groupby(segments, lambda each: samples.get(each.block)):
        found += [*group] * (1 if blocks is None else blocks.times)
    return found


def _profile(
    segment: StepSegment, kinds: Sequence[int | None], count: int
) -> tuple[list[int], list[int]]:
    """Return the changes by kind up to the moment in a segment that holds most, and to its end."""
    now, peak, total, most = [0] * count, [0] * count, 0, 0
    for event in segment.events:
        if isinstance(event, Change) and (kind := kinds[event.storage]) is not None:
            now[kind] += event.bytes
            total += event.bytes
            if total > most:
                most, peak = total, now.copy()
    return peak, now
