"""Traffic of a recorded step, by hand."""

import pytest
import torch.distributed.tensor  # noqa: F401  (its operators are recorded)

from tests.plan import recorded
from tests.tables import data
from torchtitan.plan.messages import LinkTraffic, link_traffic, nodes

SENT = data(__file__)


@pytest.mark.parametrize("name", SENT)
def test_a_layout_sends_as_much_as_it_needs(name):
    step = recorded.step(recorded.job(name), 2)
    sent = {one.operation: one.bytes for one in link_traffic(step, 2) if one.bytes > 8}
    assert sent == SENT[name]


def test_traffic_is_added_up_by_axis_and_link():
    step = recorded.step(recorded.job("HSDP 2 x 2"), 4)
    found = {(one.axis, one.operation): one for one in link_traffic(step, ranks_per_node=2)}
    shards, replicas = ("dp_shard", "reduce_scatter"), ("dp_replicate", "all_reduce")
    # Four units: two blocks of 9,280 elements, and 19,360 in the embedding, and the output.
    sent = 4 * (2 * 9280 + 19360)
    assert found[shards] == LinkTraffic(*shards, "node", 4, sent // 2)
    assert found[replicas] == LinkTraffic(*replicas, "network", 4, sent // 2)


def test_ranks_are_on_the_nodes_of_their_number():
    assert nodes([0, 1, 2, 3], 4) == 1
    assert nodes([0, 8, 16], 8) == 3
    assert nodes(range(16), 8) == 2
