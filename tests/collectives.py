"""Counts what each rank sends in an optimizer step, beside what the formulas say."""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from torchtitan.device import Device
from torchtitan.estimate.traffic import of_step
from torchtitan.flight_recorder import Collective, recorded
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.parallel.work import Traffic
from torchtitan.tools.verify.measure import training

SINGLE_NUMBERS = 6
"""Elements of the largest all-reduce that is about single numbers: losses, counts and the like."""


class Message(NamedTuple):
    """A collective, or a message that this rank sends."""

    ranks: tuple[int, ...]
    operation: str
    bytes: int
    """Of the whole, as in `Traffic`."""


class Counted(NamedTuple):
    """What one rank took part in during a step."""

    messages: Counter[Message]
    single_numbers: int
    """All-reduces of a few numbers, which are not in `messages`."""
    axes: dict[str, tuple[int, ...]]
    """The ranks of each axis."""
    expected: Counter[Message]
    """What the formulas say."""

    def exchanges_of_experts(self, messages: Counter[Message]) -> Counter[Message]:
        """The all-to-alls between ranks with different experts, among some messages."""
        group = self.axes.get("ep")
        is_one = {m: m.ranks == group and m.operation == "all_to_all" for m in messages}
        return Counter({m: count for m, count in messages.items() if is_one[m]})


def count(job: JobConfig) -> Counted:
    """On this rank, what the last step of `job` sends; TORCH_FR_BUFFER_SIZE was set before."""
    logger.setLevel(logging.ERROR)
    sends: list[Message] = []
    last, before = -1, 0
    with counting_sends(sends):
        for run, row in training(job, Device("cpu"), uneven=False):
            world = run.agree.world
            if row["step"] == job.training.steps - 1:
                last, before = recorded()[-1].number, len(sends)
    found = [collective for collective in recorded() if collective.number > last]
    is_single = [is_about_numbers(collective) for collective in found]
    groups = world.groups
    axes = {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in groups.items()}
    expected: Counter[Message] = Counter()
    stage, mesh = dist.get_rank(groups["pp"]), world.parameter_mesh.mesh
    copy = dist.get_rank(groups["dp_replicate"])
    for name, ranks in {"sharing": mesh[stage], "shards": mesh[stage, copy], "all": mesh}.items():
        axes[name] = tuple(sorted(ranks.flatten().tolist()))
    in_backward = job.communication.replicas.in_backward
    place = axes["sharing" if in_backward else "shards"].index(dist.get_rank())
    for one in formulas(job, dist.get_world_size(), stage, place):
        expected[Message(members(one, axes, dist.get_rank()), one.operation, one.bytes)] += (
            one.count
        )
    counted = [message(c) for c, single in zip(found, is_single, strict=True) if not single]
    return Counted(Counter(counted + sends[before:]), sum(is_single), axes, expected)


def members(one: Traffic, axes: dict[str, tuple[int, ...]], rank: int) -> tuple[int, ...]:
    """The ranks that take part in a collective with `rank`."""
    ranks = axes[one.axis]
    size = one.ranks or len(ranks)
    first = ranks.index(rank) // size * size
    return ranks[first : first + size]


@contextmanager
def counting_sends(sends: list[Message]) -> Iterator[None]:
    """Note every message that this process sends meanwhile."""
    send = dist.ProcessGroup.send

    def noted(group: dist.ProcessGroup, tensors: list[torch.Tensor], *rest: Any) -> Any:
        ranks = tuple(dist.get_process_group_ranks(group))
        sends.append(Message(ranks, "send", sum(tensor.nbytes for tensor in tensors)))
        return send(group, tensors, *rest)

    with mock.patch.object(dist.ProcessGroup, "send", noted):
        yield


def is_about_numbers(collective: Collective) -> bool:
    """Whether it is of losses, counts and the like, or of a report, which is not of every step."""
    if collective.operation != "all_reduce":
        return False
    elements = sum(math.prod(shape.sizes) for shape in collective.inputs)
    return elements <= SINGLE_NUMBERS or collective.caller.endswith(("(table)", "(sum)"))


def message(collective: Collective) -> Message:
    """Gloo's records of what an all-gather ends with differ, so that follows from what it takes."""
    ranks = collective.group.ranks
    parts = len(ranks) if collective.operation == "all_gather" else 1
    return Message(ranks, collective.operation, collective.bytes_in * parts)


def formulas(job: JobConfig, ranks: int, stage_rank: int = 0, rank: int = 0) -> list[Traffic]:
    """What a step sends according to `torchtitan.estimate.traffic`."""
    return of_step(job.layout(job.degrees(ranks)), job.work(ranks), job.optimizer, stage_rank, rank)
