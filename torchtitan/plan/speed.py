"""Time of a step: of the kernels of each rank, of exposed communication, and of the pipeline.

`device_streams` runs each recorded rank by itself. In a pipeline its actions take the time that
they take there, and `parallel.schedules` finds when each runs. Ranks on a CPU that are more than
its cores take turns, and one that waits for another stage leaves its turn to others. Not modeled:
ranks that wait for slower ones, and waiting for data.
"""

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch

from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.parallel import stages
from torchtitan.parallel.schedules import Action, Orders, Slot, timeline
from torchtitan.plan.device_streams import COMPUTE, HOST, DeviceStreams, Interval
from torchtitan.plan.expansion import RankStep, StepSegment
from torchtitan.plan.fake_rank import GATHER, REDUCTION
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.messages import message_seconds, messages_of
from torchtitan.tasks import TASKS

AGREEMENTS = 3
"""All-reduces of scalars in a step outside of the recording: targets, losses, status."""
ENDS = ("end of forward", "end of backward")
"""Marks after which the result of an action is there, for the next stage."""
FINEST = 1e-3
"""Share of a step below which intervals of a lane are joined."""


@dataclass(frozen=True)
class StepTime:
    """Time of a step, of the rank with most to do; its parts add up to `seconds`."""

    seconds: float
    compute: float
    """Seconds of the kernels of forwards and backwards."""
    exposed: Mapping[str, float]
    """Seconds in which the device waits for communication, by axis."""
    bubble: float
    """Seconds in which it waits for other stages of the pipeline."""
    host_bound: float
    """Seconds in which it waits for the host to issue kernels."""
    update: float
    """Seconds of the gradient norm and the update."""
    tokens_per_second_per_device: float
    """Throughput; for tasks without tokens, in their units."""
    mfu: float | None
    """Model FLOPs utilization, 0 to 1; None: the device's peak is unknown."""
    lanes: Mapping[str, Sequence[Interval]]
    """Work of the rank: "compute", and its communication by axis."""
    schedule: Sequence[Slot]
    """Actions of all ranks of the pipeline; empty without one."""


def step_time(
    job: JobConfig,
    ranks: int,
    steps: Mapping[int, RankStep],
    hardware: Hardware,
    alike: Mapping[int, int] = MappingProxyType({}),
) -> StepTime:
    """Estimate the time of a step.

    Args:
        steps: steps by pipeline rank.
        alike: pipeline ranks to those in `steps` that are like them; others take the time of the
            nearest.
    """
    degrees, model, orders = job.degrees(ranks), MODELS[job.model.name], _orders(job, ranks)
    turns = hardware.ranks_per_core(ranks)
    timed = {
        rank: _time_rank(job, step, orders[rank], hardware, turns) for rank, step in steps.items()
    }
    nearest = {rank: min(timed, key=lambda each: abs(each - rank)) for rank in orders} | {**alike}
    durations, rests = dict[Action, float](), dict[Action, float]()
    for rank, actions in orders.items():
        for action, each in zip(actions, timed[nearest[rank]].times_of(actions), strict=True):
            durations[action], rests[action] = each.end - each.start, each.rest
    first = next(iter(steps.values()))
    pipeline = next(
        (first.source.members[n] for n, a in first.source.axes.items() if a == "pp"), [0]
    )
    sending = message_seconds("send", max(map(_border_bytes, steps.values())), pipeline, hardware)
    slots = timeline(orders, durations, rests, sending)
    end, end_at_once = (
        max(slot.end + rests[slot.action] for slot in each)
        for each in (slots, timeline(orders, durations, rests))
    )
    busy = {rank: sum(durations[a] + rests[a] for a in row) for rank, row in orders.items()}
    mean = sum(busy.values()) / len(busy)
    faster = max(1 / turns, mean / end)  # with the turns of ranks that wait for other stages
    slowest = max(busy, key=lambda rank: busy[rank])
    mine = timed[nearest[slowest]]
    spent = {"all": 0.0, **{name: faster * each for name, each in mine.spent.items()}}
    compute, host_bound = spent.pop(COMPUTE, 0.0), spent.pop(HOST, 0.0)
    if degrees.pp > 1:
        spent["pp"] = faster * (end - end_at_once)
    if ranks > 1:
        spent["all"] = AGREEMENTS * message_seconds("all_reduce", 8, range(ranks), hardware)
    update = max(each.update for each in timed.values())
    seconds = faster * end + spent["all"] + update
    units = job.accumulation(degrees) * job.local_batch(degrees) * degrees.data
    units *= TASKS[model.task].units(job.training.seq_len)
    flops = units * model.flops_per_unit(job.model_args(), job.training.seq_len)
    peak = hardware.peak(getattr(torch, job.training.mixed_precision_param))
    own = [slot for slot in slots if slot.rank == nearest[slowest]]
    return StepTime(
        seconds,
        compute,
        {axis: each for axis, each in sorted(spent.items()) if each},
        faster * (end_at_once - busy[slowest]),
        host_bound,
        update,
        units / seconds / ranks,
        flops / seconds / ranks / peak if peak else None,
        {name: _coarse(lane, seconds, faster) for name, lane in mine.lanes(own, end).items()},
        [_scaled(slot, faster) for slot in slots] if degrees.pp > 1 else (),
    )


class _ActionTime(NamedTuple):
    """Time of an action of a rank that waits for no other stage."""

    action: Action
    start: float
    end: float
    rest: float
    """Time until the next action, such as the rest of a reduction."""


@dataclass(frozen=True)
class _RankTime:
    """Time of a rank that waits for no other stage."""

    actions: Sequence[_ActionTime]
    streams: DeviceStreams
    spent: Mapping[str, float]
    """Time of the device in all actions."""
    update: float

    def times_of(self, actions: Sequence[Action]) -> Iterator[_ActionTime]:
        """Yield the times of actions of a rank with as many stages.

        A rank has another order, and may split other numbers of backwards in halves: each action
        takes as long as the action of its kind at the same fraction of this rank's order.
        """
        known: dict[tuple[int, str], list[_ActionTime]] = {}
        places = _places([each.action for each in self.actions])
        for each, place in zip(self.actions, places, strict=True):
            known.setdefault((place, each.action.kind), []).append(each)
        keys = [(p, each.kind) for p, each in zip(_places(actions), actions, strict=True)]
        total, seen = Counter(keys), Counter[tuple[int, str]]()
        for key in keys:
            last = len(known[key]) - 1
            yield known[key][round(seen[key] * last / max(total[key] - 1, 1))]
            seen[key] += 1

    def lanes(self, slots: Sequence[Slot], end: float) -> dict[str, list[Interval]]:
        """Return the lanes with each action at its slot, and the update from `end`."""
        last = self.actions[-1].end + self.actions[-1].rest
        starts = [each.start for each in self.actions]
        shifts = [slot.start - start for slot, start in zip(slots, starts, strict=True)]
        found: dict[str, list[Interval]] = {}
        for name, lane in self.streams.lanes.items():
            for start, stop, what in lane:
                after = bisect.bisect_right(starts, start) - 1
                shift = end - last if start >= last else shifts[max(after, 0)]
                found.setdefault(name, []).append(Interval(start + shift, stop + shift, what))
        return found


def _time_rank(
    job: JobConfig, step: RankStep, actions: Sequence[Action], hardware: Hardware, turns: float
) -> _RankTime:
    streams = DeviceStreams(
        step.source, hardware, chunks=job.parallelism.enable_async_tensor_parallel, turns=turns
    )
    *recorded, update = _by_action(step)
    found = []
    for action, segments in zip(actions, recorded, strict=True):
        start = streams.clock
        main = _end(segments)
        streams.run(segments[:main])
        end = streams.clock
        streams.run(segments[main:])
        found.append(_ActionTime(action, start, end, streams.clock - end))
    spent, end = dict(streams.spent), streams.clock
    streams.run(update)
    return _RankTime(found, streams, spent, streams.clock - end)


def _end(segments: Sequence[StepSegment]) -> int:
    """Return the index in an action at which its result is there."""
    names = [each.name for each in segments]
    in_pipeline = [i for i, name in enumerate(names) if name[:1].isdigit()]  # such as 2F0
    for index, name in enumerate(names):
        follows = in_pipeline and index > in_pipeline[0]
        if name in ENDS or (follows and name.startswith((REDUCTION, GATHER))):
            return index
    return len(segments)


def _by_action(step: RankStep) -> list[Sequence[StepSegment]]:
    """Return the segments of each forward and backward, and those of the norm and the update."""
    first, *parts, update = step.parts
    found: list[list[StepSegment]] = []
    before = [*first.segments]
    for part in parts:
        if part.action is not None:
            found.append([*before, *part.segments])
            before = []
        elif found and part is parts[-1]:
            found[-1] += part.segments
        else:
            before += part.segments
    return [*found, update.segments]


def _places(actions: Sequence[Action]) -> list[int]:
    """Return the index of each action's stage among the stages of its rank."""
    stages = sorted({action.stage for action in actions})
    return [stages.index(action.stage) for action in actions]


TimedT = TypeVar("TimedT", Interval, Slot)


def _scaled(timed: TimedT, times: float) -> TimedT:
    return timed._replace(start=times * timed.start, end=times * timed.end)


def _coarse(lane: Iterable[Interval], seconds: float, times: float) -> list[Interval]:
    """Join intervals that nearly touch if they are too short to be seen."""
    found: list[Interval] = []
    for each in (_scaled(interval, times) for interval in lane):
        if found and each.end - found[-1].start < FINEST * seconds:
            found[-1] = found[-1]._replace(end=each.end)
        else:
            found.append(each)
    return found


def _orders(job: JobConfig, ranks: int) -> Orders:
    """Return the actions of each rank of the pipeline in a step, of which each batch is a pass."""
    degrees, spec = job.degrees(ranks), MODELS[job.model.name]
    count = job.parallelism.microbatches(job.local_batch(degrees)) if degrees.pp > 1 else 1
    orders = {0: [Action(0, "F", 0), Action(0, "B", 0)]}
    if degrees.pp > 1:
        network = build_empty(spec.build, job.model_args(), job.training.seq_len)
        orders = stages.orders(job.parallelism, len(spec.blocks(network)), count)
    return {
        rank: [
            action._replace(microbatch=action.microbatch + number * count)
            for number in range(job.accumulation(degrees))
            for action in actions
        ]
        for rank, actions in orders.items()
    }


def _border_bytes(step: RankStep) -> int:
    """Return the size of the largest message between stages."""
    sizes = (
        message.bytes
        for message in messages_of(step)
        if message.operation == "send" and step.source.axes[message.group] == "pp"
    )
    return max(sizes, default=0)
