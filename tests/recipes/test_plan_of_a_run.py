"""`torchtitan plan RUN`: what a run measured, next to the plan of its recipe."""

import json

import pytest

from tests.run_folders import row, write_run
from torchtitan.checks import load_job
from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.plan import plan
from torchtitan.tools.cli import main

CPU = """
[job]
hardware = "cpu"
[model]
name = "llama3"
flavor = "debugmodel"
[training]
seq_len = 64
local_batch_size = 2
"""


def rows_of(folder, capsys):
    assert main(["plan", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    return {each["quantity"].strip(): each for each in found}


@pytest.mark.gate
def test_measured_is_next_to_planned(tmp_path, capsys):
    parts = {"time/backward": 2.0, "time/clip": 0.2, "time/optimizer": 0.3}
    reports = [row(1, memory_gib=2.5, step_time=9.0), row(2, **parts)]
    device = {"ranks": 2, "device": "some CPU", "device_type": "cpu"}
    run = write_run(tmp_path / "run", reports, CPU, device)
    found = rows_of(run, capsys)
    planned = plan(load_job(run / "recipe.toml", (), 2, "cpu").config, 2, find_hardware("cpu"))
    assert planned.time is not None
    peak = found["process at the peak"]
    assert peak["planned"] == pytest.approx(planned.reserved_gib.value + planned.outside_gib)
    assert peak["low"] < peak["planned"] < peak["high"]
    assert peak["measured"] == 2.5
    assert found["speed"]["measured"] == 100.0
    assert found["step"]["planned"] == planned.time.seconds
    assert found["step"]["measured"] == 1.0, "the first report is of a step that starts up"
    split = ("forwards and backwards", "gradient norm and update", "all else, not planned")
    assert found[split[0]]["measured"] == 3.0
    assert found[split[1]]["measured"] == 0.5
    seconds = sum(each["planned"] or 0 for each in [*found.values()][3:])
    assert seconds == pytest.approx(planned.time.seconds)


@pytest.mark.gate
def test_of_unknown_hardware_only_memory_is_planned(tmp_path, capsys):
    device = {"ranks": 1, "device": "NVIDIA Unknown", "device_type": "cuda"}
    recipe = CPU.replace('"cpu"', '"h100"')
    run = write_run(tmp_path / "run", [row(1), row(2)], recipe, device)
    assert [*rows_of(run, capsys)] == ["reserved at the peak"]


def test_a_folder_that_is_no_run_is_refused(tmp_path, says):
    assert f"{tmp_path}: has no metrics.jsonl" in says("plan", tmp_path, status=2)
    assert "recipe.toml" in says("plan", write_run(tmp_path / "old", [row(1), row(2)]), status=2)
