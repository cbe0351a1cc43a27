"""Messages of a recorded step: what each axis, operation and link carries, and how long they take.

The time of a collective is as NCCL carries it out. Large tensors move around rings (Patarasuk and
Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002). A ring visits all ranks of a node before it leaves the
node, and the ranks of a node share the rings, so that each network adapter carries one part. The
time is that of the bytes on the slowest link, and of a hop between each two neighbors. All-reduces
of few bytes use trees, with fewer hops.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan.comm import Operation, sent_bytes
from torchtitan.plan.expansion import RankStep
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.recording import Message

LinkName = Literal["node", "network"]
Kind = tuple[str, Operation, LinkName]
START = 6.6e-6
"""Seconds from the launch of a collective to its first hop, as in NCCL's own model of a ring."""


@dataclass(frozen=True)
class LinkTraffic:
    """Messages of one kind in a step of a rank."""

    axis: str
    """Key of `World.groups`, or the purpose of a group of other ranks."""
    operation: Operation
    link: LinkName
    """Slowest link between the ranks."""
    count: int
    bytes: int
    """Bytes that the rank sends in all of them (`torchtitan.comm.sent_bytes`)."""


def link_traffic(step: RankStep, ranks_per_node: int) -> list[LinkTraffic]:
    """Add up the messages of a step."""
    source, counts, sent = step.source, Counter[Kind](), Counter[Kind]()
    for message, count in messages_of(step).items():
        ranks = source.members[message.group]
        link: LinkName = "network" if nodes(ranks, ranks_per_node) > 1 else "node"
        kind = source.axes[message.group], message.operation, link
        counts[kind] += count
        sent[kind] += round(count * sent_bytes(message.operation, message.bytes, len(ranks)))
    return [LinkTraffic(*kind, counts[kind], sent[kind]) for kind in counts if sent[kind]]


def messages_of(step: RankStep) -> Counter[Message]:
    """Count the messages of a step."""
    return Counter(message for segment in step.segments for message in segment.messages)


def nodes(ranks: Sequence[int], ranks_per_node: int) -> int:
    """Return the number of nodes that ranks are on; the nearest ranks share a node."""
    return len({rank // ranks_per_node for rank in ranks})


def message_seconds(
    operation: Operation, size: int, ranks: Sequence[int], hardware: Hardware
) -> float:
    """Return the seconds of a collective over `ranks`, or of a message between two of them.

    Args:
        size: bytes of the whole tensor, as in `torchtitan.comm.sent_bytes`.
    """
    count = len(ranks)
    if count == 1 or not size:
        return 0.0
    node, network = hardware.node, hardware.network
    far = nodes(ranks, hardware.ranks_per_node)
    near = math.ceil(count / far)
    if operation == "send":
        link = network if far > 1 else node
        return START + link.latency * 1e-6 + size / (link.bandwidth * 1e9)
    if operation == "all_to_all":
        latency = (network if far > 1 else node).latency
        inside, outside = size * (near - 1) / count, size * (count - near) / count
        seconds = max(inside / (node.bandwidth * 1e9), outside / (network.bandwidth * 1e9))
        return START + latency * 1e-6 + seconds
    bandwidth = min(node.bandwidth, near * network.bandwidth) if far > 1 else node.bandwidth
    if near == 1:
        bandwidth = network.bandwidth
    hops = (count - far) * node.latency + (far - 1) * network.latency
    seconds = size * (count - 1) / count / (bandwidth * 1e9)
    if operation == "all_reduce":
        hops = 2 * ((near - 1) * node.latency + math.ceil(math.log2(far)) * network.latency)
        seconds *= 2
    return START + hops * 1e-6 + seconds
