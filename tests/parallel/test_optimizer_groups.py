"""Groups with numbers of their own, and roles that are left to another rule: on every layout the
run of one rank, and resumed on another layout the run never stopped."""

import importlib
from functools import partial
from pathlib import Path

import pytest

from tests import tiny
from tests.layouts import ONE, case, named, resumed
from tests.ranks import run_ranks
from tests.runs import are_the_runs_of_one_rank, compare, on_one_rank, resumes
from tests.tiers import tiers
from tests.tiny import help_text
from torchtitan.build import build
from torchtitan.checks import load_job
from torchtitan.config import RecipeError
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.optim import name_parameters
from torchtitan.optim.grouping import describe_groups
from torchtitan.parallel import Launch, open_world

pytestmark = pytest.mark.usefixtures("uncompiled")
OUTSIDE = "tests.normalized"
"""An optimizer outside the tree."""


@pytest.fixture(autouse=True)
def registered():
    importlib.import_module(OUTSIDE)


EMBEDDING = {"roles": ["embedding"], "lr_factor": 0.5, "weight_decay": 0.0}
QUERIES = {"names": ["layers.*.wq.weight"], "lr_factor": 2.0, "weight_decay": 0.5}
HEAD = {"roles": ["norm", "head"], "lr_factor": 0.3}
ADAM = {"lr": 1e-3, "groups": [EMBEDDING, QUERIES | {"beta1": 0.5}, HEAD | {"beta2": 0.8}]}
SGD = {"name": "SGD", "lr": 0.5, "momentum": 0.9}
SGD |= {"groups": [EMBEDDING, QUERIES | {"momentum": 0.5, "weight_decay": 1e-3}, HEAD]}
# With a smaller eps the rounding of the smallest gradients is seen in the weights.
ADAMW = {"lr": 2e-3, "beta2": 0.9, "eps": 1e-6}
NORMALIZED = {"name": "Normalized", "lr": 0.02, "adamw": ADAMW}
NORMALIZED |= {"groups": [EMBEDDING | {"beta1": 0.5}, QUERIES | {"momentum": 0.5}, HEAD]}
OPTIMIZERS = {"AdamW": ADAM, "SGD": SGD, "Normalized": NORMALIZED}

LAYOUTS = named("DDP 2", "FSDP 2", "HSDP 2 x 2", "TP 2", "FSDP 2 x TP 2")
LAYOUTS["PP 2"] = case(2, batch=4)


def job(layout, optimizer, folder="unused", **sections):
    sections["training"] = {"max_norm": 0.3} | sections.get("training", {})
    flavor = {"flavor": "square"}
    return tiny.job(folder, **layout.recipe(model=flavor, optimizer=optimizer, **sections))


def of_each(layout):
    return [job(layout, optimizer) for optimizer in OPTIMIZERS.values()]


@pytest.mark.parametrize("name", tiers(LAYOUTS, ["HSDP 2 x 2", "TP 2", "PP 2"], ["FSDP 2 x TP 2"]))
def test_groups_train_the_same_run_as_one_rank(name):
    layout = LAYOUTS[name]
    are_the_runs_of_one_rank(layout, of_each(layout), of_each(ONE))


@pytest.mark.gate
def test_groups_matter():
    """The comparison means something: without any one group the run is another."""
    for number, (name, optimizer) in enumerate(OPTIMIZERS.items()):
        for group in range(3):
            left = [g for n, g in enumerate(optimizer["groups"]) if n != group]
            (found,) = on_one_rank([job(ONE, optimizer | {"groups": left})])
            with pytest.raises(AssertionError):
                compare(found, on_one_rank(of_each(ONE))[number], name)


def test_groups_where_the_backward_updates():
    early = {"early_step_in_backward": True}
    free = {"training": {"max_norm": 0.0}}
    whole = case(shard=2, batch=4)
    one = [job(ONE, ADAM, **free), job(ONE, SGD, **free)]
    two = [job(whole, ADAM | early, **free), job(whole, SGD | early, **free)]
    are_the_runs_of_one_rank(whole, two, one)


def resumable(optimizer, folder, layout, steps):
    return job(layout, OPTIMIZERS[optimizer], folder, **resumed(steps))


@pytest.mark.parametrize("optimizer", tiers(OPTIMIZERS, [], gate=["SGD"]))
def test_groups_resume_on_another_layout(optimizer, tmp_path):
    others = {name: LAYOUTS[name] for name in ("TP 2", "PP 2")}
    resumes(partial(resumable, optimizer), tmp_path, LAYOUTS["FSDP 2"], others, 2, 4, 1e-5)


def seen(job):
    """Role, shape, placements and peak rate of each parameter on this rank; what is logged."""
    with open_world(job.degrees(Launch.read().size), job.comm, Device("cpu")) as world:
        run = build(job, world)
        run.batches.close()
        rates = {
            parameter: group["peak_lr"]
            for optimizer in run.optimizers.inner.rules
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        found = {
            p.name: (p.role, tuple(p.shape), [str(x) for x in p.placements], rates[p.tensor])
            for p in name_parameters(run.model.parts, MODELS["tiny"].role)
        }
        assignments, stages = run.optimizers.inner.assignments, world.groups["pp"]
        return found, list(describe_groups(job.optimizer, assignments, stages, world.device))


def test_what_an_optimizer_is_told_of_parameters():
    ((one, lines),) = run_ranks(seen, 1, job(ONE, ADAM))
    assert lines[0] == (
        "optimizer.groups.0: roles embedding: 1 tensors, 40,960 parameters, with lr_factor 0.5, "
        "weight_decay 0"
    )
    assert {name.rpartition(".")[0]: role for name, (role, *_) in one.items()} == {
        "tok_embeddings": "embedding",
        "norm": "norm",
        "output": "head",
        **{f"layers.{n}.{norm}_norm": "norm" for n in "01" for norm in ("attention", "ffn")},
        **{f"layers.{n}.attention.{w}": "matrix" for n in "01" for w in ("wq", "wk", "wv", "wo")},
        **{f"layers.{n}.feed_forward.{w}": "matrix" for n in "01" for w in ("w1", "w2", "w3")},
    }
    factors = {name: rate / 1e-3 for name, (*_, rate) in one.items()}
    assert factors["layers.1.attention.wq.weight"] == pytest.approx(2)
    assert factors["layers.1.attention.wk.weight"] == pytest.approx(1)
    assert factors["tok_embeddings.weight"] == pytest.approx(0.5)
    assert factors["output.weight"] == factors["norm.weight"] == pytest.approx(0.3)
    for name in ("FSDP 2", "TP 2"):
        for found, same in run_ranks(seen, 2, job(LAYOUTS[name], ADAM)):
            assert found.keys() == one.keys()
            assert same == lines
            for parameter, (role, shape, placements, rate) in found.items():
                assert (role, shape, rate) == (*one[parameter][:2], one[parameter][3])
                is_whole = name == "TP 2" and role == "norm"
                assert any(p.startswith("S") for p in placements) != is_whole, parameter
    stages, logged = zip(*run_ranks(seen, 2, job(LAYOUTS["PP 2"], ADAM)), strict=True)
    assert logged == (lines, lines)
    assert stages[0].keys() | stages[1].keys() == one.keys()
    assert not stages[0].keys() & stages[1].keys()
    assert all(found[name][3] == one[name][3] for found in stages for name in found)


def test_an_optimizer_outside_the_tree_has_a_section_within_its_own(tmp_path):
    recipe = Path(__file__).with_name("optimizer_groups.toml")
    flags = ["--optimizer.adamw.beta2", "0.9", "--optimizer.groups.0.lr_factor", "0.5"]
    made = load_job(recipe, flags, 1, "cpu").config.optimizer
    assert (made.adamw.lr, made.adamw.beta1, made.adamw.beta2) == (2e-3, 0.8, 0.9)
    assert (made.groups[0].eps, made.groups[0].lr_factor) == (1e-6, 0.5)
    for key in ("adamw.state_dtype", "groups.0.momentum", "momentum"):
        assert f"  --optimizer.{key}  (" in help_text(JobConfig)
    with pytest.raises(RecipeError) as error:
        load_job(recipe, ["--optimizer.groups.0.momentum", "0.5"], 1, "cpu")
    assert error.value.lines == [
        "--optimizer.groups.0.momentum: got 0.5; the update rule of "
        "layers.0.attention_norm.weight, which is of the role norm, has no momentum"
    ]
