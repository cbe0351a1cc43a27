"""Messages of a recorded step are those of the formulas, which equal what real ranks send."""

from collections import Counter

import pytest
import torch.distributed.tensor  # noqa: F401  (its operators are recorded)

from tests.estimate import recorded
from tests.layouts import EXPERT_PARALLEL, FULL, LAYOUTS, RESHARD, Case, case, schedule
from tests.tiers import tiers
from torchtitan.estimate.link_traffic import LinkTraffic, link_traffic, messages_of, nodes
from torchtitan.estimate.traffic import of_step

SINGLE_NUMBERS = 24
"""Bytes of the largest all-reduce of scalars, which the formulas omit."""
DEEP = {"n_layers": 12}
CASES: dict[str, Case] = {
    **{name: recorded.small(layout) for name, layout in LAYOUTS.items() if not layout.convert},
    # Blocks, accumulated batches and both that are not recorded.
    "FSDP 2, 12 layers, accumulating 4": case(shard=2, batch=1, **{RESHARD: "always"}).of(**DEEP),
    "FSDP 2 x TP 2, 12 layers, full recomputation": case(shard=2, tp=2, recompute=FULL).of(**DEEP),
    **{name: EXPERT_PARALLEL[name] for name in ("EP 2 of 4", "EP 2, full recomputation")},
    "EP 2, FSDP 2 x TP 2 x PP 2": EXPERT_PARALLEL["EP 2, FSDP 2 x TP 2 x PP 2"],
    "PP 2, 1F1B, 16 layers": schedule("1F1B").of(n_layers=16),
    "PP 2, 1F1B, 5 passes": case(2, batch=2, training={"global_batch_size": 10}),
}
DAILY = (
    *("CP 2 x TP 2, Ulysses, documents", "PP 2, DualPipeV"),
    # Recorded for other tests, too.
    *("DDP 2, accumulating 4", "FSDP 2 x CP 2, loss in chunks", "FSDP 2, CPU offload"),
    *("TP 2, neither", "PP 2, 1F1B"),
)
GATE = (
    *("FSDP 2", "FSDP 2, never reshard", "HSDP 2 x 2, accumulating 2", "FSDP 2 x TP 2"),
    *("TP 2", "CP 2", "CP 4, ring, documents", "EP 2 of 4"),
    *(
        "PP 2, ZBVZeroBubble",
        "PP 2, Interleaved1F1B",
        "PP 2, 1F1B, 5 passes",
        "FSDP 2 x PP 2",
        "TP 2 x PP 2",
    ),
    *("FSDP 2, 12 layers, accumulating 4", "TP 2 x PP 2, auxiliary losses"),
    "FSDP 2 x TP 2 x PP 2",
)

UNKNOWN = {
    # Without chunks z-loss takes a log-sum-exp of its own: two sums over ranks, 8 microbatches.
    ("TP 2 x PP 2, auxiliary losses", 1): {("all_reduce", 128, 2): 16},
}
"""Messages that real ranks send and the formulas omit, by layout and stage rank."""


@pytest.mark.parametrize("name", tiers(CASES, DAILY, gate=GATE))
def test_recorded_messages_are_those_of_the_formulas(name: str) -> None:
    layout = CASES[name]
    job, ranks = recorded.job(layout), layout.ranks
    degrees = job.degrees(ranks)
    apart = job.parallelism.expert_parallel_degree
    shared = {"fsdp": degrees.fsdp, "efsdp": degrees.fsdp // apart, "ep": apart}
    sizes = degrees._asdict() | shared
    for stage_rank in range(degrees.pp):
        step = recorded.step(job, ranks, stage_rank * ranks // degrees.pp)
        found = Counter[tuple[object, ...]]()
        for message, count in messages_of(step).items():
            if message.bytes > SINGLE_NUMBERS:
                size = len(step.source.members[message.group])
                found[message.operation, message.bytes, size] += count
        expected = Counter[tuple[object, ...]](UNKNOWN.get((name, stage_rank), {}))
        for one in of_step(job.layout(degrees), job.work(ranks), job.optimizer, stage_rank):
            expected[one.operation, one.bytes, one.ranks or sizes[one.axis]] += one.count
        assert found == expected, f"stage rank {stage_rank}"


def test_traffic_is_added_up_by_axis_and_link() -> None:
    step = recorded.step(recorded.job("HSDP 2 x 2"), 4)
    found = {(one.axis, one.operation): one for one in link_traffic(step, ranks_per_node=2)}
    shards, replicas = ("dp_shard", "reduce_scatter"), ("dp_replicate", "all_reduce")
    # Four units: two blocks of 9,280 elements, and 19,360 in the embedding, and the output.
    sent = 4 * (2 * 9280 + 19360)
    assert found[shards] == LinkTraffic(*shards, "node", 4, sent // 2)
    assert found[replicas] == LinkTraffic(*replicas, "network", 4, sent // 2)


def test_ranks_are_on_the_nodes_of_their_number() -> None:
    assert nodes([0, 1, 2, 3], 4) == 1
    assert nodes([0, 8, 16], 8) == 3
    assert nodes(range(16), 8) == 2
