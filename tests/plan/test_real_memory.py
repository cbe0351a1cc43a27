"""Planned memory is that of real steps, within 2 %; `benchmarks/plan_memory.py` has all layouts."""

import pytest

from tests import layouts
from tests.layouts import EXPERT_PARALLEL, LAYOUTS, OSS, case
from tests.plan import recorded
from tests.plan.real_memory import measured, planned
from tests.ranks import run_ranks
from tests.research.layouts import LAYOUTS as SYSTEMS
from tests.research.layouts import installed
from tests.tiers import tiers

LOCO = {"gradients": {"name": "loco", "bucket": 64}}
CASES = {
    name: (LAYOUTS | SYSTEMS)[name]
    for name in (
        *("DDP 2", "FSDP 2, accumulating 4", "FSDP 2, always reshard", "FSDP 2, never reshard"),
        *("FSDP 2, CPU offload", "HSDP 2 x 2", "TP 2, neither", "CP 2, ring"),
        *("PP 2, 1F1B", "PP 2, Interleaved1F1B", "PP 2, DualPipeV"),
        *("SimpleFSDP 2, accumulating 4", "rotated 2, accumulating 4"),
    )
    if name in LAYOUTS | SYSTEMS
} | installed({"FSDP 2, LoCo": case(shard=2, communication=LOCO)})
CASES["FSDP 2, one block"] = case(shard=2).of(n_layers=1)
for name in ("FSDP 2, accumulating 4", "TP 2"):
    CASES[f"{name}, biases and sinks"] = LAYOUTS[name].of(**OSS)
CASES["EP 2 of 4"] = EXPERT_PARALLEL["EP 2 of 4"]
GATE = ("FSDP 2, accumulating 4", "HSDP 2 x 2", "TP 2, neither", "CP 2, ring")
GATE += ("PP 2, Interleaved1F1B",)


@pytest.mark.parametrize("name", tiers(CASES, ["FSDP 2, one block"], gate=GATE))
def test_planned_memory_is_that_of_a_real_step(name):
    """Choices of experts are not balanced, so ranks have more or less than planned."""
    layout = CASES[name]
    job = layouts.job(layout, "AdamW", training={"steps": 4})
    for rank, real in enumerate(run_ranks(measured, layout.ranks, job)):
        plan = planned(job, layout.ranks, rank)
        assert plan.bytes == pytest.approx(real.bytes, rel=0.06 if name == "EP 2 of 4" else 0.02)
        assert plan.moment == real.moment


def test_waiting_for_a_collective_allocates_nothing():
    storages = recorded.record(recorded.job("TP 2, neither"), 2).recording.storages
    allocated = {each.allocated_by for each in storages}
    assert "_c10d_functional.all_gather_into_tensor" in allocated
    assert "_c10d_functional.wait_tensor" not in allocated
