"""The comparisons of the main road, for the layouts of the systems that are there."""

import pytest

from tests.checkpoint import test_resume
from tests.layouts import LAYOUTS, ROWWISE, case
from tests.parallel import test_collectives, test_convert, test_muon, test_optimizers, test_parity
from tests.ranks import run_ranks
from tests.research import layouts
from tests.research.layouts import DAILY, GATE, ROTATED, SIMPLE, installed, of_system
from tests.runs import train
from tests.tables import data
from tests.tiers import tiers
from tests.training import test_statistics


@pytest.mark.parametrize("name", tiers(layouts.LAYOUTS, DAILY, gate=GATE))
def test_layout_trains_the_same_run_as_one_rank(name):
    test_parity.is_the_run_of_one_rank(layouts.LAYOUTS[name], "cpu")


TABLE = data(__file__)
SENDING = installed(
    {name: of_system(name) for name in TABLE["systems"]}
    | {name: case(**given) for name, given in TABLE["own"].items()}
)
SENT_DAILY = [name for name in TABLE["daily"] if name in SENDING]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", tiers(SENDING, SENT_DAILY, gate=TABLE["gate"]))
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
