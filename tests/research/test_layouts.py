"""The comparisons of the main road, for the layouts of the systems that are there."""

import pytest

from tests.checkpoint import test_resume
from tests.layouts import LAYOUTS, ROWWISE, case
from tests.parallel import test_collectives, test_convert, test_muon, test_optimizers, test_parity
from tests.ranks import run_ranks
from tests.research import layouts
from tests.research.layouts import DAILY, GATE, ROTATED, SIMPLE, installed, of_system
from tests.runs import train
from tests.tiers import tiers
from tests.training import test_statistics

BFLOAT16 = {"mixed_precision_param": "bfloat16"}
LOCO = {"gradients": {"name": "loco", "bucket": 64, "scales": "bfloat16"}}
DEMO = {"replicas": {"name": "demo", "sign": False, "chunk": 10, "verify_steps": 0}}
SLICES = {"replicas": {"name": "slicing", "sign": False, "verify_steps": 0}}
HOP = {"replicas": {"name": "loco", "bucket": 64}}
TWO_HOPS = {**LOCO, "replicas": HOP["replicas"] | {"verify_steps": 0}}
QSDP = {way: {"name": "qsdp", "bits": 5, "bucket": 64} for way in ("weights", "gradients")}
LEARNED = QSDP | {"gradients": QSDP["gradients"] | {"bits": 4, "levels": "learned"}}


@pytest.mark.parametrize("name", tiers(layouts.LAYOUTS, DAILY, gate=GATE))
def test_layout_trains_the_same_run_as_one_rank(name):
    test_parity.is_the_run_of_one_rank(layouts.LAYOUTS[name], "cpu")


IN_TENSORS = "TP 2, all losses, of latents too, full recomputation"
IN_A_RING = "CP 2, ring, unbalanced, losses of latents"
SENT = (
    *("SimpleFSDP, HSDP 2 x 2, full recomputation", "SimpleFSDP 2 x TP 2, accumulating"),
    *("SimpleFSDP 2 x PP 2", "rotated 2, copies 2", "rotated 2 x CP 2, documents"),
    *("PP 2, 1F1B, all losses, of latents too", "TP 2 x PP 2, all losses, of latents too"),
    *("SimpleFSDP 2, all losses, of latents too", "rotated 2, losses of latents"),
    *("rotated 2", "rotated 4, bfloat16, full recomputation"),
    *("rotated 2, in place, loss in chunks", "CP 2 x TP 2, all losses, of latents too"),
    *("FSDP 2, all losses, of latents too, full recomputation", IN_TENSORS, IN_A_RING),
    "SimpleFSDP 2 x PP 2, ZBVZeroBubble, full recomputation",
)
SENDING = installed(
    {
        **{name: of_system(name) for name in SENT},
        "FSDP 2, LoCo": case(shard=2, communication=LOCO),
        "FSDP 2, QSDP, bfloat16": case(shard=2, communication=QSDP, training=BFLOAT16),
        "FSDP 2 x TP 2, QSDP": case(shard=2, tp=2, communication=QSDP),
        "HSDP 2 x 2, LoCo": case(replicate=2, shard=2, batch=1, communication=LOCO),
        "HSDP 2 x 2, DeMo": case(replicate=2, shard=2, batch=1, communication=DEMO),
        "HSDP 2 x 2, LoCo in two hops": case(replicate=2, shard=2, batch=1, communication=TWO_HOPS),
        "DDP 3, LoCo": case(replicate=3, training={"global_batch_size": 12}, communication=HOP),
        "FSDP 2, QSDP with learned levels": case(shard=2, communication=LEARNED),
        "DDP 2 x PP 2, slices": case(2, replicate=2, batch=4, communication=SLICES),
    }
)
SENDING_DAILY = ("FSDP 2, LoCo", "HSDP 2 x 2, DeMo", "rotated 2")
SENDING_IN_GATE = (
    *("SimpleFSDP, HSDP 2 x 2, full recomputation", "rotated 2, copies 2", "DDP 3, LoCo"),
    *("HSDP 2 x 2, LoCo in two hops", "FSDP 2, QSDP with learned levels"),
    *(IN_TENSORS, IN_A_RING),
)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    "name", tiers(SENDING, [n for n in SENDING_DAILY if n in SENDING], gate=SENDING_IN_GATE)
)
def test_step_sends_what_is_planned(name, monkeypatch):
    test_collectives.sends_what_is_planned(SENDING[name], monkeypatch)


SHARDED = installed(
    {"SimpleFSDP 2": case(shard=2, sharding=SIMPLE), "rotated 2": case(shard=2, sharding=ROTATED)}
)


@pytest.mark.parametrize("name", tiers(SHARDED, []))
def test_muon_trains_the_same_run_as_one_rank(name):
    test_muon.is_the_run_of_one_rank(SHARDED[name])


in_graph = pytest.mark.skipif("SimpleFSDP 2" not in SHARDED, reason="the system is not there")


@pytest.mark.slow
@in_graph
def test_steps_in_the_backward():
    test_optimizers.is_updated_in_the_backward(case(shard=2, batch=4, sharding=SIMPLE))


@pytest.mark.slow
@in_graph
def test_what_is_compiled_is_the_same_run():
    layout = case(shard=2, convert=ROWWISE, sharding=SIMPLE)
    test_convert.is_compiled_to_the_same_run(layout, {"granularity": "model"})


@pytest.mark.slow
@in_graph
def test_the_run_with_statistics_is_the_same_to_the_bit(one_rank, tmp_path):
    sections = {**test_statistics.compiled("model"), "sharding": SIMPLE}
    test_statistics.is_the_same_to_the_bit(case(shard=2), sections, one_rank, tmp_path)


PAIRS = [
    (before, after)
    for before, after in (
        ("FSDP 2 x TP 2", "SimpleFSDP, HSDP 2 x 2, full recomputation"),
        ("SimpleFSDP 2, accumulating 4", "FSDP 2 x TP 2"),
    )
    if {before, after} <= LAYOUTS.keys() | layouts.LAYOUTS.keys()
]


@pytest.mark.parametrize(("before", "after"), tiers(PAIRS, [], gate=[]))
def test_another_layout_goes_on_with_the_same_run(before, after, tmp_path, straights):
    both = LAYOUTS | layouts.LAYOUTS
    for layout, steps in ((both[before], 2), (both[after], 4)):
        run_ranks(train, layout.ranks, test_resume.recipe(tmp_path, layout, steps))
    test_resume.is_the_same_run(tmp_path, straights["deep"])


straights = test_resume.straights
one_rank = test_statistics.one_rank
