"""A run that is stopped and started again is the run that was never stopped."""

import json
import shutil

import pytest
import torch

from tests import layouts
from tests.layouts import LAYOUTS
from tests.ranks import run_ranks
from tests.runs import losses, rows, train, train_each
from tests.tables import table

ALONE = "one rank, accumulating 8"
BITWISE = [ALONE, "DDP 2", "FSDP 2", "FSDP 4", "HSDP 2 x 2", "TP 2", "CP 2", "PP 2, 1F1B"]
DAILY = (ALONE, "FSDP 2", "PP 2, 1F1B")
RESUMES = table(__file__, "resumes.txt")


def groups(*rows):
    """The pairs of each tier that end on as many ranks, which run them one after the other."""
    found = []
    for tier in ("default", "gate", "slow"):
        chosen = [pair for of_tier, *pair in rows if of_tier == tier]
        for ranks in sorted({LAYOUTS[after].ranks for _, after in chosen}):
            group = [pair for pair in chosen if LAYOUTS[pair[1]].ranks == ranks]
            marks = [pytest.mark.costs("DTensor derives its shardings in every process")]
            marks += [getattr(pytest.mark, tier)] if tier != "default" else []
            name = f"{tier}, {ranks} rank{'s' * (ranks > 1)}"
            found.append(pytest.param(group, id=name, marks=marks))
    return found


def recipe(folder, layout, steps, flavor="deep", **sections):
    """The recipe of the parity tests, saved at step 2 and at the end."""
    defaults = {
        "job": {"dump_folder": str(folder)},
        "model": {"flavor": flavor},
        "training": {"steps": steps},
        "lr_scheduler": {"total_steps": 4},
        "checkpoint": {"enable": True, "interval": 2},
        "validation": {"enable": True, "freq": 2, "steps": 1},
    }
    return layouts.job(layout, "AdamW", **layouts.tiny.merged(defaults, sections))


def flavor_of(*names):
    """Two layers, unless a layout has more stages than that."""
    many = ("PP 4", "ZBV", "DualPipeV")
    return "deep" if any(word in name for name in names for word in many) else "flat"


@pytest.fixture(scope="module")
def straights(tmp_path_factory):
    """Four steps of each flavor on one rank."""
    folder = tmp_path_factory.mktemp("straight")
    found = {flavor: folder / flavor for flavor in ("flat", "deep")}
    jobs = [recipe(path, LAYOUTS[ALONE], 4, flavor) for flavor, path in found.items()]
    run_ranks(train_each, 1, jobs)
    return found


@pytest.mark.parametrize(
    "pairs", groups(*(("default" if n in DAILY else "slow", n, n) for n in BITWISE))
)
def test_same_layout_is_bitwise_the_same(pairs, tmp_path):
    names = [name for name, _ in pairs]
    jobs = [
        recipe(tmp_path / name / part, LAYOUTS[name], steps, "flat")
        for name in names
        for part, steps in (("whole", 4), ("halves", 2), ("halves", 4))
    ]
    found = run_ranks(train_each, LAYOUTS[names[0]].ranks, jobs)[0]
    for number, name in enumerate(names):
        whole, _, halves = found[3 * number : 3 * number + 3]
        assert all(torch.equal(halves[key], weight) for key, weight in whole.items()), name
        is_bitwise_the_same(tmp_path / name / "halves", tmp_path / name / "whole")


def is_bitwise_the_same(halves, whole):
    assert losses(halves) == losses(whole), whole
    assert list(losses(halves)) == [1, 2, 3, 4]
    for key in ("grad_norm", "lr", "tokens", "validation_loss"):
        found, expected = (
            {row["step"]: row[key] for row in rows(folder) if row.get(key) is not None}
            for folder in (halves, whole)
        )
        assert expected
        assert found == expected, f"{whole}: {key}"


@pytest.mark.parametrize("pairs", groups(*RESUMES))
def test_another_layout_goes_on_with_the_same_run(pairs, tmp_path, straights):
    here = LAYOUTS[pairs[0][1]].ranks
    first = {}
    then = []
    for before, after in pairs:
        folder, flavor = tmp_path / f"{before} to {after}", flavor_of(before, after)
        ranks = LAYOUTS[before].ranks
        first.setdefault(ranks, []).append(recipe(folder, LAYOUTS[before], 2, flavor))
        then.append(recipe(folder, LAYOUTS[after], 4, flavor))
    then = first.pop(here, []) + then
    for ranks, jobs in first.items():
        run_ranks(train_each, ranks, jobs)
    run_ranks(train_each, here, then)
    for before, after in pairs:
        is_the_same_run(tmp_path / f"{before} to {after}", straights[flavor_of(before, after)])


def is_the_same_run(folder, straight):
    """Another layout went on with it."""
    assert losses(folder) == pytest.approx(losses(straight), rel=1e-5), folder
    for key, tolerance in {"grad_norm": 1e-4, "validation_loss": 1e-5}.items():
        found, expected = (
            {row["step"]: row[key] for row in rows(where) if row.get(key)}
            for where in (folder, straight)
        )
        assert found == pytest.approx(expected, rel=tolerance), f"{folder}: {key}"
    files = (each / "checkpoint/step-4/train_state.json" for each in (folder, straight))
    positions = [json.loads(file.read_text())["data"] for file in files]
    assert positions[0] == positions[1], folder


def test_pairs_are_many_and_every_axis_is_left_and_entered():
    _, *sides = zip(*RESUMES, strict=True)
    assert len(set(RESUMES)) >= 20
    for axis in ("pp", "replicate", "shard", "cp", "tp"):
        befores, afters = ({getattr(LAYOUTS[name], axis) for name in side} for side in sides)
        assert min(befores) == min(afters) == 1
        assert max(befores) >= 2
        assert max(afters) >= 2


def test_lanes_carry_a_run_over_to_another_global_batch(tmp_path):
    lanes = {"data": {"lanes": 16}}
    run_ranks(train, 1, recipe(tmp_path, LAYOUTS[ALONE], 2, "flat", **lanes))
    half = {"training": {"steps": 4, "global_batch_size": 4}}
    run_ranks(train, 2, recipe(tmp_path, LAYOUTS["FSDP 2"], 4, "flat", **lanes, **half))
    state = json.loads((tmp_path / "checkpoint/step-4/train_state.json").read_text())
    assert state["data"]["samples"] == 2 * 8 + 2 * 4


def test_curve_past_the_last_checkpoint_is_replaced_not_repeated(tmp_path):
    run_ranks(train, 1, recipe(tmp_path, LAYOUTS[ALONE], 3, "flat"))
    # As after a kill: step 3 was logged but its checkpoint does not exist.
    shutil.rmtree(tmp_path / "checkpoint/step-3")
    first = losses(tmp_path)
    run_ranks(train, 1, recipe(tmp_path, LAYOUTS[ALONE], 4, "flat"))
    second = losses(tmp_path)
    steps = [row["step"] for row in rows(tmp_path) if "loss" in row]
    assert steps == [1, 2, 3, 4]
    assert {step: second[step] for step in first} == first
