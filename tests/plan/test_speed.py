"""Time of a step, on hardware whose numbers make it exact by hand."""

from collections import Counter

import pytest
import torch
import torch.distributed.tensor

from tests.layouts import LAYOUTS, case, schedule
from tests.plan import recorded
from tests.tiers import tiers
from torchtitan.parallel.schedules import Action, timeline
from torchtitan.parallel.stages import orders
from torchtitan.plan.device_streams import CONTENTION, DeviceStreams
from torchtitan.plan.expansion import StepSegment
from torchtitan.plan.fake_rank import RankRecording
from torchtitan.plan.hardware import Link, find_hardware
from torchtitan.plan.messages import START, message_seconds
from torchtitan.plan.recording import Kernel, Message, Recording
from torchtitan.plan.speed import step_time

SECOND = 10**9
"""Bytes that memory and links move in a second."""
TINY = 1e-4
"""More seconds than the latencies of a test add up to."""


def device(**settings):
    link = Link(bandwidth=1, latency=0.01)
    fast = {"memory_bandwidth": 5.0, "node": link, "network": link, "host_us": 0.01}
    return find_hardware("h100").model_copy(update={**fast, **settings})


def kernel(seconds, flops=0):
    return Kernel("aten.add", flops, int(5 * SECOND * seconds), 0, torch.bfloat16, ())


def message(operation, seconds, overlaps=True, group="f"):
    """Collective of two ranks, which each send half."""
    whole = {"all_reduce": 1, "send": 1}.get(operation, 2)
    return Message(group, operation, int(whole * seconds * SECOND), overlaps)


def source():
    axes = {"f": "dp_shard", "r": "dp_replicate", "t": "tp", "c": "cp"}
    return RankRecording(Recording(), axes, dict.fromkeys(axes, (0, 1)), {}, 1)


def run(*segments, chunks=False, **settings):
    streams = DeviceStreams(source(), device(**settings), chunks=chunks)
    streams.run([StepSegment(name, "", events) for name, events in segments])
    return streams


def near(seconds):
    return pytest.approx(seconds, abs=TINY)


def test_gathers_of_the_forward_overlap_with_the_block_before():
    """The second block's gather takes twice as long as the first block's computation."""
    streams = run(
        ("forward", [message("all_gather", 1)]),
        ("forward of 0", [kernel(1)]),
        ("end of forward of 0", [message("all_gather", 2)]),
        ("forward of 1", [kernel(1)]),
    )
    assert streams.clock == near(1 + 2 + 1)
    assert streams.spent["dp_shard"] == near(1 + 1)
    assert streams.spent["compute"] == near(2)


def test_gathers_of_the_backward_are_prefetched():
    streams = run(
        ("backward", [message("all_gather", 1), message("all_gather", 3)]),
        ("backward of 1", [kernel(2)]),
        ("backward of 0", [kernel(2)]),
    )
    assert streams.clock == near(1 + 3 + 2)
    assert streams.spent["dp_shard"] == near(1 + 3 - 2 * CONTENTION)


def test_a_reduction_overlaps_with_the_next_block():
    streams = run(
        ("backward", []),
        ("backward of 1", [kernel(2), message("reduce_scatter", 1)]),
        ("backward of 0", [kernel(2), message("reduce_scatter", 1)]),
        ("end of backward", [kernel(1)]),
    )
    # During the first reduction, which takes a second, less of the next block is computed.
    assert streams.clock == near(2 + 2 + (1 - 1 / CONTENTION) + 1 + 1)
    assert streams.spent["dp_shard"] == near(1)


def test_a_sum_over_replicas_follows_the_reduce_scatter():
    """The next reduce-scatter waits for a link that the sum over replicas uses."""
    both = [message("reduce_scatter", 1), message("all_reduce", 1, group="r")]
    streams = run(("backward of 0", [kernel(1), *both]), ("end of backward", []))
    assert streams.clock == near(3)
    assert streams.spent["dp_shard"] == near(1)
    assert streams.spent["dp_replicate"] == near(1)


def test_tensor_parallel_collectives_are_exposed():
    gathered = [message("all_gather", 1, overlaps=False, group="t"), kernel(2, flops=1)]
    assert run(("forward of 0", gathered)).spent["tp"] == near(1)
    # Of two ranks, half of the shorter one overlaps.
    assert run(("forward of 0", gathered), chunks=True).spent["tp"] == near(0.5)
    scattered = [kernel(1, flops=1), message("reduce_scatter", 3, overlaps=False, group="t")]
    assert run(("forward of 0", scattered), chunks=True).spent["tp"] == near(2.5)


def test_ring_attention_overlaps_with_its_messages():
    ring = [message("send", 1, group="c"), message("send", 1, group="c"), kernel(1)]
    streams = run(("forward of 0", ring))
    assert streams.clock == near(2)
    assert streams.spent["cp"] == near(2 - CONTENTION)


def test_short_kernels_wait_for_the_host():
    streams = run(("forward of 0", [kernel(0.001)] * 10), host_us=4000)
    assert streams.clock == near(0.04)
    assert streams.spent["host"] == near(0.03)


def test_nothing_overlaps_on_a_cpu():
    streams = run(
        ("backward of 0", [kernel(2), message("reduce_scatter", 1), kernel(2)]), device_type="cpu"
    )
    assert streams.clock == near(5)


def test_a_pipeline_takes_the_time_of_its_actions_and_messages():
    orders = {0: [Action(0, k, m) for k, m in (("F", 0), ("F", 1), ("B", 0), ("B", 1))]}
    orders[1] = [Action(1, k, m) for k, m in (("F", 0), ("B", 0), ("F", 1), ("B", 1))]
    durations = {
        a: (1.0 if a.kind == "F" else 2.0) * (1 + a.stage) for each in orders.values() for a in each
    }
    # The second rank is busy for 12, waits for the first forward, and the first for its backward.
    assert max(slot.end for slot in timeline(orders, durations)) == 1 + 12 + 2
    # Messages on the way there and back; the others overlap with what the second rank computes.
    assert max(slot.end for slot in timeline(orders, durations, sending=0.5)) == 13 + 2 + 2 * 0.5
    # What the second rank still does after an action delays its next one, not the first rank.
    rests = dict.fromkeys(durations, 0.0) | {Action(1, "B", 1): 7.0, Action(1, "B", 0): 3.0}
    ends = {slot.action: slot.end for slot in timeline(orders, durations, rests)}
    assert ends[Action(0, "B", 0)] == 1 + 6 + 2
    assert ends[Action(0, "B", 1)] == 1 + 6 + 3 + 6 + 2
    assert all(isinstance(slot.end, int) for slot in timeline(orders))


def test_time_of_collectives():
    link, slow = Link(bandwidth=100, latency=2), Link(bandwidth=10, latency=5)
    cluster = device(node=link, network=slow, ranks_per_node=8)
    node, far = range(8), range(64)
    size = 8 * SECOND
    ring = START + 7 * 2e-6 + 7 / 100
    assert message_seconds("all_gather", size, node, cluster) == pytest.approx(ring)
    assert message_seconds("all_reduce", size, node, cluster) == pytest.approx(2 * ring - START)
    # Eight adapters of 10 GB/s carry a node's part of the rings.
    wide = START + (56 * 2 + 7 * 5) * 1e-6 + 8 * 63 / 64 / 80
    assert message_seconds("reduce_scatter", size, far, cluster) == pytest.approx(wide)
    # One rank of each node has one adapter.
    apart = START + 7 * 5e-6 + 7 / 10
    assert message_seconds("all_gather", size, range(0, 64, 8), cluster) == pytest.approx(apart)
    assert message_seconds("send", size, [0, 8], cluster) == pytest.approx(START + 5e-6 + 0.8)
    assert message_seconds("all_to_all", size, node, cluster) == pytest.approx(START + 2e-6 + 0.07)
    assert message_seconds("all_gather", size, [0], cluster) == 0


def timed(job, ranks, hardware):
    pp = job.degrees(ranks).pp
    steps = {rank: recorded.step(job, ranks, rank * ranks // pp) for rank in range(pp)}
    return step_time(job, ranks, steps, hardware)


@pytest.mark.parametrize(
    "name", tiers(["FSDP 2 x TP 2", "PP 2, ZBVZeroBubble", "PP 2, 1F1B"], ["PP 2, 1F1B"])
)
def test_parts_add_up_to_the_time_of_the_step(name):
    layout = LAYOUTS[name]
    job, hardware = recorded.job(name), find_hardware("h100")
    found = timed(job, layout.ranks, hardware)
    parts = found.compute + sum(found.exposed.values()) + found.bubble
    assert parts + found.host_bound + found.update == pytest.approx(found.seconds)
    assert min(found.compute, found.bubble + 1e-12, found.host_bound, found.update) > 0
    tokens = job.training.seq_len * job.global_batch(job.degrees(layout.ranks))
    rate = tokens / found.seconds / layout.ranks
    assert found.tokens_per_second_per_device == pytest.approx(rate)
    assert bool(found.schedule) == bool(found.bubble) == (layout.pp > 1)
    for lane in found.lanes.values():
        assert all(0 <= each.start <= each.end <= found.seconds * 1.001 for each in lane)


@pytest.mark.gate
def test_faster_links_are_never_slower():
    layout = case(replicate=2, shard=2, tp=2, batch=1)
    job = recorded.job(layout)
    step = {0: recorded.step(job, 8)}
    hardware = find_hardware("h100")
    seconds = []
    for bandwidth in (0.1, 1, 10, 100, 1000):
        link = Link(bandwidth=bandwidth, latency=5)
        host = dict.fromkeys(("host_us", "dispatch_us"), 0.01)
        links = {"node": link, "network": link, "ranks_per_node": 4}
        faster = hardware.model_copy(update=host | links)
        seconds.append(step_time(job, 8, step, faster).seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.5 * seconds[-1]


def test_the_time_of_a_missing_rank_is_that_of_the_nearest():
    job = recorded.job("PP 4, 1F1B")
    steps = {rank: recorded.step(job, 4, rank) for rank in (0, 1, 3)}
    hardware = find_hardware("h100")
    found = step_time(job, 4, steps, hardware)
    assert {slot.rank for slot in found.schedule} == {0, 1, 2, 3}
    ends = {(slot.rank, slot.action.kind): slot.end - slot.start for slot in found.schedule}
    assert ends[2, "F"] == pytest.approx(ends[1, "F"])


def test_a_missing_rank_may_split_other_numbers_of_backwards():
    job = recorded.job(recorded.small(schedule("DualPipeV", 4)))
    found = step_time(job, 4, {3: recorded.step(job, 4, 3)}, find_hardware("h100"))
    halves = Counter(slot.rank for slot in found.schedule if slot.action.kind == "W")
    assert halves[0] > halves[3]
    count = job.parallelism.microbatches(job.local_batch(job.degrees(4)))
    actions = orders(job.parallelism, job.model_args().n_layers, count).values()
    assert len(found.schedule) == sum(map(len, actions))
    assert found.bubble > 0


def test_gradients_are_reduced_after_a_stage_has_sent_its_result():
    job = recorded.job(recorded.small(schedule("1F1B", shard=2)))
    step = recorded.step(job, 4, 2)
    hardware = find_hardware("h100")
    slow = hardware.model_copy(update={"node": Link(bandwidth=1e-3, latency=5)})
    ends = []
    for each in (hardware, slow):
        found = step_time(job, 4, {1: step}, each)
        *_, other, last = (s for s in found.schedule if s.rank == 1 and s.action.kind == "B")
        assert last.end - last.start == pytest.approx(other.end - other.start, rel=0.1)
        ends.append(found.lanes["dp_shard"][-1].end - last.end)
    assert ends[1] > 10 * ends[0]


def test_mfu_is_unknown_without_a_peak():
    job, hardware = recorded.job("one rank, loss in chunks"), find_hardware("h100")
    assert timed(job, 1, hardware).mfu
    peaks = hardware.peaks.model_copy(update={"float32": None})
    assert timed(job, 1, hardware.model_copy(update={"peaks": peaks})).mfu is None
