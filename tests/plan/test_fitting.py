"""Whether a run fits in this machine, and what is said if it does not."""

from unittest.mock import Mock

import pytest

from torchtitan.checks import load_job
from torchtitan.config import RecipeError
from torchtitan.device import Device
from torchtitan.plan.fitting import _candidates
from torchtitan.tools.cli import main


def test_a_run_that_cannot_fit_is_refused(capsys):
    for verb in (["check", "--here", "--device", "cpu"], ["train"]):
        assert main([*verb, "--model.flavor", "405B", "--training.steps", "5"]) == 2
        message = " ".join(capsys.readouterr().err.split())
        assert 'error: --model.flavor: got "405B"; a rank holds at least ' in message
        assert " GiB, and the host has " in message
        assert "torchtitan plan lists changes after which a recipe fits" in message


@pytest.mark.gate
def test_a_run_that_may_not_fit_is_told(monkeypatch, capsys):
    monkeypatch.setattr(Device, "memory_available", lambda self: 0.25)
    assert main(["check", "--here", "--device", "cpu", "--training.steps", "10000"]) == 0
    noted = capsys.readouterr().err
    assert "a rank holds about " in noted
    assert "by its plan, and 0.2 of the host are free" in noted


def test_a_recipe_without_a_plan_is_told(monkeypatch, capsys, says):
    refusal = RecipeError(["this recipe cannot be planned yet: no"])
    monkeypatch.setattr("torchtitan.plan.fitting.plan", Mock(side_effect=refusal))
    words = ["check", "--training.steps", "10000"]
    told = says(*words, "--plan")
    assert "\nplanned memory: unknown, as this recipe cannot be planned yet: no\n" in told
    assert main([*words, "--device-memory", "80"]) == 2
    assert "--device-memory: got 80; this recipe cannot be planned" in capsys.readouterr().err


def test_a_change_that_fits_keeps_the_batch():
    path, flags = "train_configs/debug_model.toml", ["--training.global_batch_size=-1"]
    job = load_job(path, flags, 2, "cpu").config
    found = [flags for _, flags in _candidates(Mock(job=job, ranks=2))]
    assert all("--training.global_batch_size" in flags for flags in found)
