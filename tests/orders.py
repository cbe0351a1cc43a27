"""The order of collectives in graphs that the passes of SimpleFSDP were given, and made."""

from contextlib import contextmanager
from unittest import mock

import torch

from torchtitan.research.simple_fsdp import bucketing
from torchtitan.torch_private.graphs import nodes_of

Orders = dict[str, list[dict[str, list[int]]]]
"""When ("before", "after") to graphs, forward first, to how many products stand before each of the
collectives of a kind."""


@contextmanager
def noted():
    """Note the orders of graphs that are compiled within the context, and not read from a cache."""
    orders, count = Orders(before=[], after=[]), bucketing._count

    def note(plan, graph, when):
        count(plan, graph, when)
        products, order = 0, dict[str, list[int]]()
        for node in nodes_of(graph):
            products += node.target is torch.ops.aten.mm.default
            if kind := bucketing._kind(plan, node):
                order.setdefault(kind, []).append(products)
        orders[when].append(order)

    with mock.patch.object(bucketing, "_count", note):
        yield orders
