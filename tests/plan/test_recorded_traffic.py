"""Traffic of a recorded step, by hand."""

import pytest
import torch.distributed.tensor  # noqa: F401  (its operators are recorded)

from tests.plan import recorded
from torchtitan.plan.messages import LinkTraffic, link_traffic, nodes

GATHERED, REDUCED = 188_800, 151_680
"""Bytes that FSDP sends over two ranks, which it does on ranks with parts of sequences, too."""


SENT = {
    # Gradients are reduced in float32.
    "FSDP 2, bfloat16": {"all_gather": GATHERED // 2, "reduce_scatter": REDUCED},
    # Each half of an all-reduce is as much (arXiv:2205.05198, section 4.2.2): the numbers of
    # the loss, and of norms, are apart.
    "TP 2": {"all_gather": 163_840, "reduce_scatter": 163_840, "all_reduce": 3_720},
    "TP 2, no sequence parallelism": {"all_reduce": 2 * 163_840 + 3_080},
    # A ring sends as much as fetching at once.
    "CP 2": {"all_gather": GATHERED + 65_536, "reduce_scatter": REDUCED + 32_768},
    "CP 2, ring": {"all_gather": GATHERED, "reduce_scatter": REDUCED, "send": 98_304},
    "CP 2, Ulysses": {"all_gather": GATHERED, "reduce_scatter": REDUCED, "all_to_all": 98_304},
    "PP 2, 1F1B": {"send": 32_768},
}


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
