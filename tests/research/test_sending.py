"""Runs that send less than all: near a run that sends all, and the same after a stop."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import layouts
from tests.layouts import FULL, case
from tests.ranks import run_ranks
from tests.research.layouts import installed
from tests.runs import each, parts, trace, traced, train
from tests.tables import data
from tests.tiers import tiers
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.device import Device
from torchtitan.logging import logger
from torchtitan.tools.verify.measure import training

LAYOUTS = {
    "FSDP 2, accumulating 4, full recomputation": case(shard=2, batch=1, recompute=FULL),
    "FSDP 2 x TP 2": case(shard=2, tp=2),
    "FSDP 2 x PP 2": case(2, shard=2, batch=4),
    "FSDP 2 x CP 2": case(shard=2, cp=2),
    "HSDP 2 x 2": case(replicate=2, shard=2, batch=1),
}
ALL = data(__file__)
WAYS = [*installed({name: case(communication=way) for name, way in ALL.items()})]


def recipe(layout, way, steps, optimizer="SGD", **sections):
    """Of one block, if stages do not need more; by SGD, in which an error of scale is seen."""
    training = {"steps": steps}
    model = {"model": {"n_layers": 1}} if layout.pp == 1 else {}
    sections = {"communication": ALL.get(way, {})} | sections
    return layouts.job(layout, optimizer, training=training, **model, **sections)


def of(way):
    """The least layout in which everything is sent."""
    return case(shard=2, replicate=2) if "replicas" in ALL[way] else case(shard=2)


NEAR = {"LoCo": 1, "LoCo in two hops": 2, "QSDP": 1, "QSDP, learned levels": 5}
"""How far each may be off, in parts of what few bits are."""


@pytest.mark.costs("a run for each way to send")
@pytest.mark.parametrize("name", tiers(LAYOUTS, [*LAYOUTS][:1]))
def test_a_run_in_few_bits_is_nearly_the_run(name):
    layout = LAYOUTS[name]
    ways = [w for w in NEAR if w in WAYS and (layout.replicate > 1 or "replicas" not in ALL[w])]
    plain, *others = traced(layout, [recipe(layout, way, 3) for way in ("plain", *ways)])
    for rank, expected in enumerate(plain):
        seen = [expected.losses]
        for way, ranks in zip(ways, others, strict=True):
            found, wider = ranks[rank], NEAR[way]
            assert found.losses not in seen, way
            assert found.losses == pytest.approx(expected.losses, rel=wider * 2e-3), way
            assert found.grad_norms == pytest.approx(expected.grad_norms, rel=wider * 3e-2), way
            seen.append(found.losses)


def spoilt(job):
    """Train; on one rank the gradient of step 2 has a NaN. Losses, weights, and what is kept."""
    losses, weights, kept = [], [], list[Tensor]()
    for run, row in training(job, Device("cpu"), uneven=False):
        losses.append(row["loss"])
        weights.append({name: part.local for name, part in parts(run).items()})
        model = run.model
        kept = list(model.state().values())
        if len(losses) == 1 and dist.get_rank() == 1:
            linear = model.parts[0].get_submodule("layers.0.attention.wq")
            spoiler = linear.register_full_backward_pre_hook(
                lambda _, given: (given[0] * torch.nan,)
            )
        elif len(losses) == 2 and dist.get_rank() == 1:
            spoiler.remove()
    return losses, weights, kept


@pytest.mark.parametrize(
    "ways",
    [
        ("LoCo", "QSDP, learned levels"),
        ("LoCo in two hops", "LoCo, replicas that never agree", "slices"),
    ],
    ids=" and ".join,
)
def test_a_step_with_a_nan_is_skipped_and_leaves_nothing_behind(ways):
    ways = [way for way in ways if way in WAYS]
    jobs = [recipe(of(way), way, 3) for way in ways]
    for rank in run_ranks(each, of(ways[0]).ranks, spoilt, jobs):
        for way, (losses, weights, kept) in zip(ways, rank, strict=True):
            first, second, third = weights
            assert all(torch.equal(first[name], last) for name, last in second.items()), way
            assert not all(torch.equal(second[name], last) for name, last in third.items()), way
            assert all(math.isfinite(loss) for loss in losses), way
            assert kept, way
            assert all(state.isfinite().all() for state in kept if state.is_floating_point()), way
            assert all(weight.isfinite().all() for step in weights for weight in step.values()), way


@pytest.mark.skipif("QSDP" not in WAYS, reason="the system is not there")
def test_statistics_change_nothing():
    """Their pass rounds the weights as those of the step do."""
    layout, way = case(shard=2), {"weights": ALL["QSDP"]["weights"]}
    jobs = [
        recipe(layout, "plain", 3, communication=way, metrics={"statistics_freq": every})
        for every in (0, 1)
    ]
    for plain, measured in zip(*traced(layout, jobs), strict=True):
        for step, weights in enumerate(plain.weights):
            for name, part in weights.items():
                assert torch.equal(measured.weights[step][name].local, part.local), name


@pytest.mark.parametrize(
    "way", tiers([w for w in WAYS if w in ("LoCo", "QSDP")], [], gate=["QSDP"])
)
def test_blocks_are_compiled_around_it(way):
    compiled = {"enable": True, "backend": "aot_eager"}
    jobs = [recipe(of(way), way, 3, **more) for more in ({}, {"compile": compiled})]
    eager, found = run_ranks(each, 2, trace, jobs)[0]
    assert found.losses == pytest.approx(eager.losses, rel=1e-4)


def saved(folder, layout, way, steps, interval=3, **checkpoint):
    sections = {"job": {"dump_folder": str(folder)}}
    sections["checkpoint"] = {"enable": True, "interval": interval} | checkpoint
    return recipe(layout, way, steps, "AdamW", **sections)


@pytest.mark.costs("up to four ranks, three runs")
@pytest.mark.parametrize(
    "way",
    tiers(
        [way for way in WAYS if way not in ("slices", "LoCo, replicas that never agree")],
        [],
        gate=[
            *("LoCo", "LoCo in two hops", "QSDP, learned levels"),
            *("DeMo", "DeMo of two steps", "DiLoCo"),
        ],
    ),
)
def test_a_run_that_resumes_is_the_same_to_the_bit(way, tmp_path):
    """A run that stops after three steps, between two agreements; and one that does not save."""
    layout = of(way)
    jobs = [
        saved(tmp_path / "whole", layout, way, 4, enable=False),
        saved(tmp_path / "halves", layout, way, 3, async_mode="async"),
        saved(tmp_path / "halves", layout, way, 4, async_mode="async"),
    ]
    for at_once, _, resumed in run_ranks(each, layout.ranks, train, jobs, parts):
        assert all(torch.equal(at_once[name].local, part.local) for name, part in resumed.items())
    shapes = SavedTensors(tmp_path / "halves/checkpoint/step-4").shapes()
    kept = {name.split(".")[2] for name in shapes if name.startswith("communication.")}
    assert kept == {kind for kind, how in ALL[way].items() if how["name"] != "none"}
    replicas = ALL[way].get("replicas", {})
    runs_apart = replicas.get("every", 1) > 1 or replicas.get("name") == "none"
    assert ("replica.1.model.output.weight" in shapes) == runs_apart


def told(job):
    """The norms of gradients in all steps, and the warnings on the way."""
    with patch.object(logger, "warning") as warned:
        norms = train(job, lambda run: run.state.history["grad_norm"])
    return norms, [str(call.args[0]) for call in warned.call_args_list]


ELSEWHERE = [way for way in NEAR if way in WAYS and way != "QSDP"]


@pytest.mark.parametrize("way", tiers(ELSEWHERE, [], gate=["LoCo", "QSDP, learned levels"]))
def test_a_run_that_resumes_on_another_layout_says_so(way, tmp_path, monkeypatch):
    """What is kept starts from scratch, and the run stays near the one that never stopped."""
    one, other = case(shard=2, replicate=2, batch=1), case(shard=4, batch=1)
    monkeypatch.setitem(ALL, "elsewhere", {k: v for k, v in ALL[way].items() if k != "replicas"})
    jobs = [
        saved(tmp_path / "a", one, way, 5, 2),
        saved(tmp_path / "b", one, way, 2, 2),
        saved(tmp_path / "b", other, "elsewhere", 5, 2),
    ]
    for ranks in run_ranks(each, 4, told, jobs):
        (whole, said), (_, said_of_half), (norms, said_of_other) = ranks
        assert not said
        assert not said_of_half
        assert ["starts from scratch" in line for line in said_of_other] == [True]
        # Of five draws of QSDP's shifts, the farthest was 0.1 off.
        assert norms == pytest.approx(whole, rel=0.15)
        assert norms != whole
