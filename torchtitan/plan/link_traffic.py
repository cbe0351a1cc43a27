"""Traffic of a recorded step, by axis, operation and the link that carries it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan.comm import Operation, sent_bytes
from torchtitan.plan.expansion import RankStep
from torchtitan.plan.recording import Message

LinkName = Literal["node", "network"]
Kind = tuple[str, Operation, LinkName]


@dataclass(frozen=True)
class LinkTraffic:
    """Messages of one kind in a step of a rank."""

    axis: str
    """Key of `World.groups`, or the purpose of a group of other ranks."""
    operation: Operation
    link: LinkName
    """Slowest link between the ranks."""
    count: int
    sent: int
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
