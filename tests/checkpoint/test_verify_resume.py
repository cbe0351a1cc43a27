"""`torchtitan verify-resume`: it passes what is right, and names what is wrong, and when.

Ranks are forked, so a fault that is put into this process is in them too.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.tables import table
from torchtitan.checkpoint import contents
from torchtitan.data import DataStream
from torchtitan.data.lanes import Lane, SampleStart
from torchtitan.device import Device
from torchtitan.logging import progress_bar
from torchtitan.parallel import ParallelModel
from torchtitan.tools.cli import main
from torchtitan.tools.verify import measure
from torchtitan.tools.verify.measure import Step, TensorDifference
from torchtitan.tools.verify.report import Resumption


@pytest.fixture(autouse=True)
def in_folder_with_a_recipe(in_empty_folder):
    shutil.copy(Path(__file__).with_name("tiny.toml"), "r.toml")


VERIFY = ["verify-resume", "r.toml", "--steps", "2"]


@pytest.fixture
def alone(says):
    """The command on one rank, at first."""
    return partial(says, *VERIFY, "--world-size", "1")


def test_a_run_on_one_rank_and_then_on_two(capsys):
    assert main([*VERIFY, "--world-size", "1"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == "r.toml on one rank"
    assert '  checkpoints: in a separate folder, with async_mode = "async"' in said.out
    assert "killed after step 2 was saved, resumed on one rank" in lines
    assert "killed after step 2 was saved, resumed on 2 ranks (dp_shard 2)" in lines
    assert lines[-1].startswith(
        "PASS: killed after step 2 of 4 and resumed on one rank, to the bit; "
        "on 2 ranks (dp_shard 2): max loss difference "
    )
    rows = [line.split() for line in lines if line.strip().startswith("3 ")]
    assert len(rows) == 2
    assert all(row[4:6] == ["8-11", "same"] for row in rows)
    assert rows[0][3] == rows[0][6] == "0"
    assert not said.err
    assert sorted(path.name for path in Path().rglob("*")) == ["r.toml"]


@pytest.mark.gate
def test_a_run_on_two_ranks_and_then_in_a_layout_that_is_given(says):
    last = says(*VERIFY, "--then-layout", "tp=2").splitlines()[-1]
    assert "resumed on 2 ranks (dp_shard 2), to the bit; on 2 ranks (tp 2): max loss" in last


def test_optimizer_state_that_is_not_loaded_is_named(alone, monkeypatch):
    load = contents.load_into

    def forgetful(tensors, source):
        load({n: t for n, t in tensors.items() if not n.endswith("wq.weight.exp_avg")}, source)

    monkeypatch.setattr(contents, "load_into", forgetful)
    last = alone(status=1).splitlines()[-1]
    where = "FAIL: resumed on one rank, step 2, as it was loaded: optimizer.layers.0."
    assert last.startswith(f"{where}attention.wq.weight.exp_avg[")
    assert "] is 0, uninterrupted " in last
    assert last.endswith("; 2 of 85 tensors differ")


def test_a_position_that_is_off_is_named(alone, monkeypatch):
    load = DataStream.load_state_dict
    monkeypatch.setattr(
        DataStream,
        "load_state_dict",
        lambda stream, state: load(stream, state | {"samples": state["samples"] + 1}),
    )
    last = alone(status=1).splitlines()[-1]
    assert last.endswith("step 2, as it was loaded: rank 0: data.samples is 9, uninterrupted 8")


def test_samples_that_are_skipped_are_named(alone, monkeypatch):
    make = Lane.__init__

    def skipping(lane, number, *rest):
        make(lane, number, *rest)
        if number == 1 and isinstance(rest[-1], SampleStart):
            lane.next_sample()

    monkeypatch.setattr(Lane, "__init__", skipping)
    last = alone(status=1).splitlines()[-1]
    # Four sequences a step, so that sample 9 is of lane 1, and 13 comes after it there.
    assert last.endswith(
        "step 3: the uninterrupted run reads its sample 9 where this one reads its sample 13"
    )


def test_random_numbers_that_are_not_restored_are_named(alone, monkeypatch):
    train = ParallelModel.forward_backward

    def noisy(model, batches, tokens):
        loss = train(model, batches, tokens)
        for parameter in model.parts[0].parameters():
            assert parameter.grad is not None
            parameter.grad += 1e-3 * torch.randn(())
        return loss

    monkeypatch.setattr(ParallelModel, "forward_backward", noisy)
    monkeypatch.setattr(Device, "set_rng_state", lambda device, state: None)
    last = alone(status=1).splitlines()[-1]
    assert "resumed on one rank, step 2, as it was loaded: rng.0.cpu[" in last


def test_a_run_that_survives_is_told(capsys, monkeypatch):
    monkeypatch.setattr(measure, "die", lambda: None)
    assert main([*VERIFY, "--world-size", "1"]) == 1
    assert capsys.readouterr().err == "error: no comparison: the killed run: it was not killed\n"


def test_what_cannot_be_resumed_is_refused(alone):
    error = alone("--then", "3", status=2)
    assert error.startswith("error: --then: the run cannot be resumed on 3 ranks (dp_shard 3):\n")
    assert "training.global_batch_size: " in error
    error = alone("--then-layout", "xp=2", status=2)
    assert "got 'xp=2'\n  wanted axis=size, with axes pp, dp_" in error
    alone("--model.flavor", "tinny", status=2)
    alone("--then", "3", "--then-layout", "tp=2", status=2)


def note(step, loss=2.0, **rest):
    samples = {} if loss is None else {2 * step: 20 * step, 2 * step + 1: 20 * step + 1}
    defaults = {"counters": {"data.samples": 2 * step}, "samples": samples, "names": ("a",)}
    return Step(step, **defaults | {"loss": loss, "grad_norm": 1.0} | rest)


def off(name, by):
    kind = name.partition(".")[0].replace("model", "weight")
    return {
        "names": ("a", name),
        "differences": (TensorDifference(kind, name, (3,), 1 + by, 1.0, by),),
    }


@pytest.mark.parametrize(("kind", "found", "fault"), table(__file__, "faults.txt"))
def test_what_is_a_fault(kind, found, fault):
    found = json.loads(found)
    if "off" in found:
        found = off(*found["off"])
    elif "samples" in found:
        found["samples"] = {int(number): sample for number, sample in found["samples"].items()}
    whole = [[note(0, None), note(1), note(2), note(3)]] * 2
    good = [note(1, None), note(2), note(3)]
    resumed = [good, [note(1, None), note(2, **found), note(3)]]
    resumption = Resumption(whole, resumed, 1, kind == "exact")
    said = resumption.fault() or "step 2: none"
    assert said.startswith("step 2: ")
    assert fault in said
    assert resumption.table("x").row_count == 3


@pytest.mark.parametrize("is_exact", [True, False])
def test_what_is_loaded_is_what_was_saved_on_any_layout(is_exact):
    whole = [[note(0, None), note(1), note(2)]]
    resumed = [[note(1, None, **off("model.a", 1e-9)), note(2)]]
    said = Resumption(whole, resumed, 1, is_exact).fault()
    found = "model.a[3] is 1, uninterrupted 1; 1 of 2 tensors differ"
    assert said == f"step 1, as it was loaded: {found}"
    said = Resumption(whole, [[note(0, None), note(1), note(2)]], 1, is_exact).fault()
    assert said == "it resumes from step 0, but step 1 was saved"


def test_samples_of_all_ranks_are_joined():
    whole = [[note(0, None), note(1), note(2, samples={4: 40})]]
    whole += [[note(0, None), note(1), note(2, samples={5: 41})]]
    assert Resumption(whole, [[note(1, None), note(2)]], 1, True).fault() is None
    missing = [[note(1, None), note(2, samples={4: 40})]]
    said = Resumption(whole, missing, 1, True).fault()
    assert said == "step 2: sample 5 of the run was not read"


def test_the_bar_is_drawn_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("torchtitan.logging.on_terminal", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("the killed run", 4) as show:
        show(completed=3)
    assert "the killed run" in capsys.readouterr().err
