"""Whether a run fits in this machine, and what is said if it does not."""

import re
from typing import Any

import pytest

from tests.estimate import recorded
from tests.layouts import LAYOUTS
from tests.research.layouts import LAYOUTS as SYSTEMS
from tests.tiers import tiers
from torchtitan.checks import load_job
from torchtitan.checks.memory_bounds import MARGIN, OUTSIDE
from torchtitan.checks.memory_limits import of_rank
from torchtitan.config import RecipeError
from torchtitan.device import GIB, Device
from torchtitan.estimate import fitting
from torchtitan.estimate.fitting import misfits, peak_of, room
from torchtitan.estimate.plan import plan
from torchtitan.job import JobConfig
from torchtitan.tools.cli import main

FLAGS = ["--model.flavor", "405B", "--training.steps", "5"]


def load(ranks: int, more: Any) -> JobConfig:
    return load_job(None, more, ranks, "cpu").config


BOUNDED = {
    "one rank, loss in chunks": ["cpu"],
    "DDP 2, accumulating 4": ["cpu"],
    "FSDP 2 x CP 2, loss in chunks": ["cpu"],
    "FSDP 2, CPU offload": ["cpu", "cuda"],
    "TP 2, neither": ["cpu"],
    "PP 2, 1F1B": ["cpu", "cuda"],
    "PP 2, DualPipeV": ["cpu"],
    "CP 2, ring, all losses, of latents too": ["cuda"],
    "CP 2, Float8 rowwise": ["cuda"],
}
"""Layouts, and the devices on which they are compared by default; on the other, by the gate."""


@pytest.mark.parametrize(
    ("name", "device_type"),
    tiers(
        [(name, device) for name in BOUNDED for device in ("cpu", "cuda")],
        [(name, device) for name, devices in BOUNDED.items() for device in devices],
    ),
)
def test_a_plan_is_between_the_bounds(name: str, device_type: Any) -> None:
    """So a launch without a plan, and one that is refused, are right; a half of it is margin."""
    layout = recorded.small((LAYOUTS | SYSTEMS)[name])
    job, ranks = recorded.job(layout), layout.ranks
    found, bounds = recorded.plan(job, ranks, device_type=device_type), of_rank(job, ranks)
    assert bounds is not None
    tensors = (found.fullest.allocated - found.fullest.workspaces) / GIB
    tensors += peak_of(found).host
    assert bounds.least().total / GIB < tensors < (bounds.most() - OUTSIDE) / MARGIN / GIB
    assert peak_of(found).device + peak_of(found).host < bounds.most() / GIB


@pytest.mark.gate
def test_a_run_that_cannot_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert main([*words, *FLAGS]) == 2
        message = " ".join(capsys.readouterr().err.split())
        assert 'error: --model.flavor: got "405B"; a rank holds at least ' in message
        assert " GiB, and the host has " in message
        return message

    told = refused("check", "--here", "--device", "cpu")
    assert "no change was found after which it fits: use at least " in told
    # Each change takes a plan.
    monkeypatch.setattr(fitting, "plan_on", lambda *_: None)
    monkeypatch.setattr(fitting, "remedy", lambda *_: "use less")
    assert "use less" in refused("train")


@pytest.mark.gate
def test_changes_that_make_a_run_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--training.local_batch_size=64", "--model.vocab_size=32768"]
    job = load(1, flags)
    bounds = of_rank(job, 1)
    assert bounds is not None
    monkeypatch.setattr(Device, "memory_limit", lambda self: 0.98 * bounds.least().total / GIB)
    (problem,) = misfits(job, 1, 1, "cpu", lambda ranks, more: load(ranks, [*flags, *more]))
    assert problem.path == "training.local_batch_size"
    uses = re.findall(r"(--[^;]*?) \([\d.]+ GiB reserved\)", problem.message)
    assert len(uses) == 3
    assert uses[0] == "--training.local_batch_size 1 --training.global_batch_size 64"
    (problem,) = misfits(job, 1, 1, "cpu")
    assert problem.message.endswith("torchtitan plan lists changes after which a recipe fits")


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--parallelism.data_parallel_replicate_degree", "4"]
    bounds = of_rank(load(4, words), 4)
    assert bounds is not None
    monkeypatch.setattr(Device, "memory_limit", lambda self: 3 * bounds.least().total / GIB)
    assert not [*misfits(load(4, words), 4, 2, "cpu")]
    (problem,) = misfits(load(4, words), 4, 4, "cpu")
    assert problem.message.startswith("4 ranks hold at least ")
    assert not [*misfits(load(4, words), 4, 4, "cuda")], "no device of this machine"


@pytest.mark.gate
def test_a_run_that_may_not_fit_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = load(1, [])
    bounds = of_rank(job, 1)
    assert bounds is not None
    monkeypatch.setattr(Device, "memory_available", lambda self: 0.25)
    (note,) = room(job, 1, 1, Device("cpu"))  # planned in a process of its own
    assert note.severity == "note"
    peak = peak_of(plan(job, 1, device_type="cpu"))
    assert note.message.startswith(f"a rank holds about {peak.device:.1f} GiB by its plan, and 0.2")
    assert main(["check", "--here", "--device", "cpu", "--training.steps", "10000"]) == 0
    assert "by its plan, and 0.2 of the host are free" in capsys.readouterr().err
    monkeypatch.setattr(Device, "memory_available", lambda self: bounds.most() / GIB)
    monkeypatch.setattr(fitting, "ProcessPoolExecutor", None)  # no plan is made
    assert not [*room(job, 1, 1, Device("cpu"))]


def test_a_recipe_without_a_plan_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **settings: Any) -> Any:
        raise RecipeError(["this recipe cannot be planned yet: no"])

    monkeypatch.setattr("torchtitan.tools.planned.plan", refuse)
    words = ["check", "--training.steps", "10000"]
    assert main([*words, "--plan"]) == 0
    told = capsys.readouterr().out
    assert "\nplanned memory: unknown, as this recipe cannot be planned yet: no\n" in told
    assert main([*words, "--device-memory", "80"]) == 2
    assert "--device-memory: got 80; this recipe cannot be planned" in capsys.readouterr().err
