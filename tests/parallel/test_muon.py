"""Muon on every layout is the run of one rank; resumed on another layout, the run never stopped."""

import shutil

import pytest

from tests import layouts, tiny
from tests.layouts import ONE, named, resumed
from tests.ranks import run_ranks
from tests.runs import are_the_runs_of_one_rank, compare, losses, on_one_rank, trace, train
from tests.tiers import tiers
from torchtitan.checkpoint import saved_steps
from torchtitan.checkpoint.storage import SavedTensors

MUON = {
    "name": "Muon",
    "lr": 1e-3,
    # In bfloat16, layouts differ by its rounding.
    "ns_dtype": "float32",
    # With a smaller eps the rounding of the smallest gradients is seen in the weights.
    "adamw": {"lr": 2e-3, "eps": 1e-6},
    "groups": [{"names": ["layers.*.wq.weight"], "lr_factor": 2.0, "momentum": 0.5}],
}
LAYOUTS = named(
    *("DDP 2", "FSDP 2", "FSDP 4", "HSDP 2 x 2", "TP 2", "CP 2", "FSDP 2 x TP 2", "FSDP 2 x PP 2"),
    *("FSDP 2 x TP 2 x PP 2", "FSDP 2 x CP 2 x TP 2", "HSDP 2 x 2 x TP 2"),
)
LAYOUTS |= {n: layouts.layout(n) for n in ("PP 2", "HSDP 2 x 2, copies added up afterwards")}
VARIANTS = [{}, {"by_head": True, "nesterov": False, "scale": "original"}]


def job(layout, folder="unused", **sections):
    # The first dim of some matrices is one that four ranks do not divide, and tensor ranks do.
    flavor = {"flavor": "deep" if layout.pp > 1 else "flat"} | sections.pop("model", {})
    optimizer = MUON | sections.pop("optimizer", {})
    sections["training"] = {"max_norm": 0.3} | sections.get("training", {})
    return tiny.job(folder, **layout.recipe(model=flavor, optimizer=optimizer, **sections))


def alone(flavor, **model):
    layout, flavors = ONE.of(**model), {"flavor": flavor}
    return [job(layout, model=flavors, optimizer=variant) for variant in VARIANTS]


@pytest.mark.parametrize(
    "name", tiers(LAYOUTS, ["FSDP 2"], [name for name in LAYOUTS if name.count(" x ") > 1])
)
def test_muon_trains_the_same_run_as_one_rank(name):
    is_the_run_of_one_rank(LAYOUTS[name])


def is_the_run_of_one_rank(layout):
    jobs = [job(layout, optimizer=variant) for variant in VARIANTS]
    are_the_runs_of_one_rank(layout, jobs, alone(jobs[0].model.flavor, **layout.model))


def test_what_the_comparison_would_find():
    """Parts of matrices that are orthogonal by themselves, as heads here, give another run."""
    (found,) = run_ranks(trace, 1, job(ONE, optimizer={"by_head": True}), True)
    with pytest.raises(AssertionError, match="attention"):
        compare(found, on_one_rank(alone("flat"))[0], "")


def resumable(folder, layout, steps):
    flavor = "deep" if folder.parent.name.endswith("PP") else "flat"
    return job(layout, folder, model={"flavor": flavor}, **resumed(steps))


@pytest.mark.parametrize("other", tiers(["TP 2", "PP 2", "HSDP 2 x 2"], [], gate=["PP 2"]))
def test_muon_resumes_on_another_layout(other, tmp_path):
    first, folder = LAYOUTS["FSDP 2"], tmp_path / other[:2]
    expected = run_ranks(train, 2, resumable(folder / "whole", first, 4))[0]
    run_ranks(train, 2, resumable(folder / "halves", first, 2))
    saved = SavedTensors(saved_steps(folder / "halves" / "checkpoint")[2]).shapes()
    states = [name for name in saved if name.startswith("optimizer.layers.0.attention.wq")]
    assert states == ["optimizer.layers.0.attention.wq.weight.momentum_buffer"]
    shutil.copytree(folder / "halves", folder / "other")
    for name, layout in (("halves", first), ("other", LAYOUTS[other])):
        for found in run_ranks(train, layout.ranks, resumable(folder / name, layout, 4)):
            for parameter, weight in found.items():
                off = (weight - expected[parameter]).abs().max()
                assert off == 0 if layout is first else off <= 1e-5, parameter
    whole = losses(folder / "whole")
    assert losses(folder / "halves") == whole
    assert losses(folder / "other") == pytest.approx(whole, rel=1e-5)


def test_in_bfloat16_a_layout_differs_by_its_rounding():
    rounded = {"ns_dtype": "bfloat16"}
    expected = on_one_rank(alone("flat"))[0]
    for own in run_ranks(trace, 2, job(LAYOUTS["FSDP 2"], optimizer=rounded), True):
        assert own.losses == pytest.approx(expected.losses, rel=1e-3)
        assert own.losses != expected.losses
