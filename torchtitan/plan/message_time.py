"""Time of a collective between ranks of one node or of several, as NCCL carries it out.

Large tensors move around rings (Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002). A ring
visits all ranks of a node before it leaves the node, and the ranks of a node share the rings, so
that each network adapter carries one part. The time is that of the bytes on the slowest link, and
of a hop between each two neighbors. All-reduces of few bytes use trees, with fewer hops.
"""

import math
from collections.abc import Sequence

from torchtitan.comm import Operation
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.link_traffic import nodes

START = 6.6e-6
"""Seconds from the launch of a collective to its first hop, as in NCCL's own model of a ring."""


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
