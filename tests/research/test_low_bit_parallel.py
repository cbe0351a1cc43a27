"""Moments in few bits in whole runs: on several ranks, saved, resumed and converted."""

import shutil
import sys
from functools import cache

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import tiny
from tests.checkpoint import test_dcp_writer, test_torch_reader
from tests.layouts import ONE, case, layout
from tests.parallel import test_optimizer_groups
from tests.parallel.test_optimizers import SQUARE, job
from tests.ranks import run_ranks
from tests.runs import each, losses, off, trace, train
from tests.tiers import tiers
from tests.training.test_optimizers import ALONE, FSDP, eager, handed_over, recipe
from torchtitan.checkpoint import saved_steps
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.optim.parameters import local
from torchtitan.research.low_bit import LowBitAdam
from torchtitan.tools.cli import main

pytestmark = pytest.mark.usefixtures("uncompiled")

# Parts that fall to each of four ranks are large enough for codes. One block, where stages do not
# need two.
LAYOUTS = {
    name: layout(name).of(n_layers=1)
    for name in ("FSDP 2", "TP 2", "DDP 2", "HSDP 2 x 2", "FSDP 2 x TP 2")
}
LAYOUTS["PP 2, Interleaved1F1B"] = layout("PP 2, Interleaved1F1B, 4 at a time")
ALLOWED = {"bfloat16": 3e-4, "float8": 0.02, "8bit": 0.02, "4bit": 0.2}
"""How far weights may be off, in parts of how far they moved; both as 2-norms."""
WITHOUT_COLUMNS = 1e-3
"""The same, where the blocks of a layout are those of one rank: 5.8e-4 has been seen, of moments
between two codes that became the other."""


def wrong_traces(jobs):
    LowBitAdam.step = with_wrong_scale(LowBitAdam.step)
    return each(trace, jobs, True)


def with_wrong_scale(step):
    """A step after which the second moment is twice what it should be."""

    def wrong(self):
        step(self)
        for state in self.state.values():
            moment = local(state["exp_avg_sq"])
            if hasattr(moment, "scale"):
                moment.scale.mul_(2)
            else:
                moment.mul_(2)

    return wrong


@cache
def reference(layers=1):
    one = ONE.of(n_layers=layers)
    (found,) = run_ranks(each, 1, trace, [job(one, state_dtype=dtype) for dtype in ALLOWED], True)
    return found


@pytest.mark.costs("four dtypes")
@pytest.mark.parametrize("name", tiers(LAYOUTS, ["FSDP 2"], gate=["TP 2", "PP 2, Interleaved1F1B"]))
def test_moments_in_few_bits(name):
    layout = LAYOUTS[name]
    jobs = [job(layout, state_dtype=dtype) for dtype in ALLOWED]
    results = run_ranks(each, layout.ranks, trace, jobs, True)
    references = reference(layout.pp)
    for number, (dtype, allowed) in enumerate(ALLOWED.items()):
        found, expected = [ranks[number] for ranks in results], references[number]
        assert off(found, expected) < (allowed if layout.tp > 1 else WITHOUT_COLUMNS), dtype
        for rank in found:
            assert rank.losses == pytest.approx(expected.losses, rel=1e-3), dtype
            assert rank.grad_norms == pytest.approx(expected.grad_norms, rel=1e-2), dtype


def test_an_error_of_scale_breaks_the_bounds():
    one = ONE.of(n_layers=1)
    (wrong,) = run_ranks(wrong_traces, 1, [job(one, state_dtype=dtype) for dtype in ALLOWED])
    for (dtype, allowed), found, expected in zip(ALLOWED.items(), wrong, reference(), strict=True):
        assert off([found], expected) > allowed, dtype


@pytest.mark.slow
def test_as_good_as_in_float32():
    """The loss after 30 steps, against how far that is from one seed to the next."""
    batch = {"local_batch_size": 4, "global_batch_size": 4}
    long = {"training": {"steps": 30} | batch, "model": SQUARE | {"n_layers": 1}}
    constant = {"lr_scheduler": {"warmup_steps": 2, "decay_ratio": 0.0}}

    def made(seed, dtype):
        optimizer = {"lr": 1e-3, "state_dtype": dtype}
        return tiny.job(**long, **constant, debug={"seed": seed}, optimizer=optimizer)

    jobs = [made(seed, "parameter") for seed in range(3)] + [made(0, dtype) for dtype in ALLOWED]
    (found,) = run_ranks(each, 1, trace, jobs, True)
    ends = [sum(trace.losses[-5:]) / 5 for trace in found]
    spread = max(ends[:3]) - min(ends[:3])
    gaps = dict(zip(ALLOWED, (abs(end - ends[0]) for end in ends[3:]), strict=True))
    assert gaps["bfloat16"] < 0.02 * spread
    assert max(gaps["float8"], gaps["8bit"]) < 0.1 * spread
    assert gaps["4bit"] < 2 * spread


def test_groups():
    few = test_optimizer_groups.ADAM | {"state_dtype": "8bit"}
    layouts = (ONE.of(n_layers=1), case(shard=2, batch=4).of(n_layers=1))
    one, two = (test_optimizer_groups.job(layout, few) for layout in layouts)
    ((expected,),) = run_ranks(each, 1, trace, [one], True)
    found = [rank[0] for rank in run_ranks(each, 2, trace, [two], True)]
    assert off(found, expected) < WITHOUT_COLUMNS


def saved(folder, layout, steps, dtype):
    """To step 4 at most; saved at step 2 and at the end."""
    return recipe(folder, layout.of(n_layers=1), steps, optimizer={"state_dtype": dtype})


@pytest.mark.costs("five runs")
@pytest.mark.parametrize("dtype", tiers(["8bit", "4bit"], [], slow=["4bit"]))
def test_a_run_with_few_bits_resumes_to_the_bit_and_elsewhere(dtype, tmp_path):
    whole, halves, other = (tmp_path / name for name in ("whole", "halves", "other"))
    at_once = [saved(whole, FSDP, 4, dtype), saved(halves, FSDP, 2, dtype)]
    weights = run_ranks(each, 2, train, at_once)[0][0]
    shapes = SavedTensors(saved_steps(halves / "checkpoint")[2]).shapes()
    assert shapes["optimizer.output.weight.exp_avg"] == (torch.float32, (320, 128))

    # On one rank, with plain states: they load, and the run goes on much as it would have. And
    # from there with few bits again.
    shutil.copytree(halves, other)
    run_ranks(each, 1, train, [saved(other, ALONE, 3, "parameter"), saved(other, ALONE, 4, dtype)])
    expected = losses(whole)
    assert losses(other) == pytest.approx(expected, rel=1e-2)
    assert losses(other)[3] == pytest.approx(expected[3], rel=1e-3)

    ((resumed,), _) = run_ranks(each, 2, train, [saved(halves, FSDP, 4, dtype)])
    assert losses(halves) == expected
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())


def test_verify_resume_keeps_the_layout_in_which_codes_are_exact(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    sizes = ["--model.name=tiny", "--model.flavor=square", "--training.seq_len=32"]
    words = ["verify-resume", *sizes, "--optimizer.state_dtype=4bit", "--steps=1"]
    assert main([*words, "--world-size=1"]) == 0
    assert main([*words, "--world-size=1", "--then=2"]) == 2
    said = capsys.readouterr()
    why = "layouts round the optimizer's states differently (optimizer.state_dtype)"
    assert f"  resumed in the same layout only: {why}" in said.out
    assert "killed after step 1 of 2 and resumed on one rank, to the bit\n" in said.out
    assert f"--then: {why}\n  add --optimizer.state_dtype parameter\n" in said.err


def test_another_replica_group_takes_the_state_over(tmp_path):
    assert run_ranks(handed_over, 1, saved(tmp_path, ALONE, 4, "8bit")) == [True]


SAVED = {
    "8 bits": (FSDP, {"model": SQUARE | {"n_layers": 1}, "optimizer": {"state_dtype": "8bit"}}),
    "bfloat16": (
        ALONE,
        {"training": test_torch_reader.HALF, "optimizer": {"state_dtype": "bfloat16"}},
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # so it is
@pytest.mark.parametrize("kind", SAVED)
def test_torch_opens_what_is_saved(kind, tmp_path):
    test_torch_reader.opens_what_a_recipe_saves(*SAVED[kind], tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # so it is
@pytest.mark.parametrize("dtype", ["8bit", "bfloat16"])
def test_moments_in_few_bits_are_what_they_stand_for(dtype, tmp_path):
    sections = {"optimizer": {"state_dtype": dtype}, "model": SQUARE | {"n_layers": 1}}
    run_ranks(eager, 1, test_dcp_writer.recipe(tmp_path, ALONE, **sections))
    name = "output.weight.exp_avg"
    wanted = SavedTensors(tmp_path / "checkpoint/step-3").read(f"optimizer.{name}")
    state = {"optimizer": {f"state.{name}": torch.zeros(wanted.shape)}}
    dcp.load(state, checkpoint_id=test_dcp_writer.converted(tmp_path, 3), no_dist=True)
    assert wanted.any()
    assert torch.equal(state["optimizer"][f"state.{name}"], wanted.float())
