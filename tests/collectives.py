"""Counts what each rank sends in an optimizer step, beside what its plan says."""

import logging
import math
from collections import Counter
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch.distributed as dist

from tests.plan import recorded as recordings
from torchtitan.device import Device
from torchtitan.flight_recorder import recorded
from torchtitan.logging import logger
from torchtitan.plan.messages import messages_of
from torchtitan.tools.verify.measure import training

SINGLE_NUMBERS = 6
"""Elements of the largest all-reduce that is about single numbers: losses, counts and the like."""


class Message(NamedTuple):
    """A collective, or a message that this rank sends."""

    ranks: tuple[int, ...]
    operation: str
    bytes: int
    """Of the whole, as in `torchtitan.comm.sent_bytes`."""


class Counted(NamedTuple):
    """What one rank took part in during a step."""

    messages: Counter[Message]
    single_numbers: int
    """All-reduces of a few numbers, which are not in `messages`; without those of reports."""
    experts: tuple[int, ...]
    """The ranks with different experts."""


def count(job):
    """On this rank, what the last step of `job` sends; TORCH_FR_BUFFER_SIZE was set before."""
    logger.setLevel(logging.ERROR)
    sends = []
    last, before = -1, 0
    with counting_sends(sends):
        for run, row in training(job, Device("cpu"), uneven=False):
            world = run.agree.world
            if row["step"] == job.training.steps - 1:
                last, before = recorded()[-1].number, len(sends)
    found = [collective for collective in recorded() if collective.number > last]
    is_single = [is_about_numbers(collective) for collective in found]
    counted = [message(c) for c, single in zip(found, is_single, strict=True) if not single]
    experts = world.groups.get("ep")
    apart = tuple(dist.get_process_group_ranks(experts)) if experts else ()
    reports = sum(collective.caller.endswith("(table)") for collective in found)
    return Counted(Counter(counted + sends[before:]), sum(is_single) - reports, apart)


def planned(job, ranks, rank):
    """What a rank sends in a step by its plan, without single numbers."""
    step, found = recordings.step(job, ranks, rank), Counter[Message]()
    for one, count in messages_of(step).items():
        if one.operation != "all_reduce" or one.bytes > 4 * SINGLE_NUMBERS:
            members = tuple(sorted(step.source.members[one.group]))
            found[Message(members, one.operation, one.bytes)] += count * (len(members) > 1)
    return +found


@contextmanager
def counting_sends(sends):
    send = dist.ProcessGroup.send

    def noted(group, tensors, *rest):
        ranks = tuple(dist.get_process_group_ranks(group))
        sends.append(Message(ranks, "send", sum(tensor.nbytes for tensor in tensors)))
        return send(group, tensors, *rest)

    with mock.patch.object(dist.ProcessGroup, "send", noted):
        yield


def is_about_numbers(collective):
    """Whether it is of losses, counts and the like, or of a report, which is not of every step."""
    if collective.operation != "all_reduce":
        return False
    elements = sum(math.prod(shape.sizes) for shape in collective.inputs)
    return elements <= SINGLE_NUMBERS or collective.caller.endswith(("(table)", "(sum)"))


def message(collective):
    """Gloo's records of what an all-gather ends with differ, so that follows from what it takes."""
    ranks = collective.group.ranks
    parts = len(ranks) if collective.operation == "all_gather" else 1
    return Message(ranks, collective.operation, collective.bytes_in * parts)
