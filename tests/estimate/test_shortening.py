"""A step recorded from few blocks, microbatches and batches equals the step recorded in full."""

import pytest

from tests import layouts
from tests.layouts import FULL, INTERLEAVED, Case, case, schedule
from tests.tiers import tiers
from torchtitan.estimate.expansion import RankStep, expand
from torchtitan.estimate.fake_rank import record
from torchtitan.estimate.shortening import Abridged
from torchtitan.parallel.schedules import order

CASES = {
    "FSDP 2, accumulating 6": case(shard=2, batch=1, training={"global_batch_size": 12}),
    "TP 2, full recomputation": case(tp=2, batch=8, recompute=FULL).of(n_layers=6),
    "PP 2, 1F1B": case(2, batch=8),
    "FSDP 2 x PP 2, Interleaved1F1B": schedule("Interleaved1F1B", shard=2),
    "FSDP 2 x PP 2 in bfloat16, accumulating 2": case(
        *(2, 1, 2),
        batch=4,
        training={"mixed_precision_param": "bfloat16", "global_batch_size": 16},
        **INTERLEAVED,
    ).of(n_layers=28),
    "PP 2, ZBVZeroBubble": schedule("ZBVZeroBubble").of(n_layers=28),
    "PP 2, DualPipeV": schedule("DualPipeV"),
}


def step(layout: Case, shorten: bool) -> RankStep:
    layers = layout.model.get("n_layers", 14 if layout.pp > 1 else 7)
    job = layouts.job(layout, "AdamW", model={"n_layers": layers})
    recording = record(job, layout.ranks, layout.ranks - 1, shorten=shorten)
    return expand(recording, job.accumulation(job.degrees(layout.ranks)))


@pytest.mark.parametrize(
    "name",
    tiers(
        CASES,
        ["TP 2, full recomputation"],
        [
            *("FSDP 2, accumulating 6", "FSDP 2 x PP 2 in bfloat16, accumulating 2"),
            *("PP 2, ZBVZeroBubble", "PP 2, DualPipeV"),
        ],
    ),
)
def test_a_short_recording_stands_for_the_whole_step(name: str) -> None:
    short, whole = (step(CASES[name], shorten) for shorten in (True, False))
    assert len(short.source.recording.events) < len(whole.source.recording.events)
    (moment, found), (expected_moment, expected) = short.peak(), whole.peak()
    assert moment.rstrip("0123456789") == expected_moment.rstrip("0123456789")
    assert found.total() == pytest.approx(expected.total(), rel=1e-3)
    for kind in expected:
        assert found[kind] == pytest.approx(expected[kind], abs=1e-3 * expected.total())
    (*_, (_, left)), (*_, (_, expected_left)) = short.levels(), whole.levels()
    assert left.total() == pytest.approx(expected_left.total(), abs=16)
    flops, expected_flops = (
        sum(kernel.flops for segment in each.segments for kernel in segment.kernels)
        for each in (short, whole)
    )
    assert flops == expected_flops
    assert [part.action for part in short.parts] == [part.action for part in whole.parts]


def test_first_and_last_microbatches_stand_for_themselves() -> None:
    orders = order("1F1B", 4, 4, 32)
    chosen = Abridged.of(orders, 1, shorten=True)
    assert chosen.microbatches <= 6
    first, last = chosen.actions[0], chosen.actions[-1]
    assert chosen.recorded[first].microbatch == 0
    assert chosen.recorded[last].microbatch == chosen.microbatches - 1
    times = sum(chosen.times(number, first.stage) for number in range(chosen.microbatches))
    assert times == 32
