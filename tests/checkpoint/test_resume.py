"""A run that is stopped and started again is the run that was never stopped."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import layouts
from tests.layouts import LAYOUTS, Case
from tests.ranks import run_ranks
from tests.runs import losses, rows, train
from tests.tiers import tiers
from torchtitan.job import JobConfig

# (ranks, copies): 1 rank, DDP, FSDP, HSDP
ALONE = "one rank, accumulating 8"
BITWISE = [ALONE, "DDP 2", "FSDP 2", "FSDP 4", "HSDP 2 x 2", "TP 2", "CP 2", "PP 2, 1F1B"]
PAIRS = [
    (ALONE, "FSDP 2 x TP 2 x PP 2"),
    (ALONE, "CP 2 x TP 2"),
    ("DDP 2", "FSDP 4"),
    ("DDP 2", "PP 2, 1F1B"),
    ("FSDP 2", "DDP 2"),
    ("FSDP 2", "TP 2"),
    ("FSDP 2", "PP 4, Interleaved1F1B"),
    ("FSDP 4", ALONE),
    ("FSDP 4", "FSDP 2 x TP 2"),
    ("HSDP 2 x 2", "FSDP 2"),
    ("HSDP 2 x 2", "FSDP 2 x CP 2"),
    ("TP 2", ALONE),
    ("TP 2", "TP 4"),
    ("TP 4", "FSDP 2"),
    ("TP 4", "TP 2 x PP 2"),
    ("FSDP 2 x TP 2", "HSDP 2 x 2"),
    ("FSDP 2 x TP 2", "PP 2, ZBVZeroBubble"),
    ("PP 2, 1F1B", "PP 2, DualPipeV"),
    ("PP 2, 1F1B", "FSDP 2 x TP 2"),
    ("PP 4, Interleaved1F1B", ALONE),
    ("PP 4, Interleaved1F1B", "FSDP 2 x PP 2"),
    ("CP 2", "TP 2"),
    ("CP 2", "CP 4, ring, unbalanced"),
    ("FSDP 2 x TP 2 x PP 2", "FSDP 4"),
    ("FSDP 2 x TP 2 x PP 2", "CP 2 x PP 2"),
]
"""Layouts to save under and to resume under, all of tests/layouts.py."""
DAILY = [
    ("DDP 2", "FSDP 4"),
    ("FSDP 2", "TP 2"),
    ("TP 2", ALONE),
    ("PP 2, 1F1B", "FSDP 2 x TP 2"),
    ("CP 2", "TP 2"),
]


def recipe(folder: Path, layout: Case, steps: int, **sections: dict[str, Any]) -> JobConfig:
    """The recipe of the parity tests, saved at step 3 and at the end."""
    defaults: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(folder)},
        "model": {"flavor": "deep"},
        "training": {"steps": steps},
        "lr_scheduler": {"total_steps": 6},
        "checkpoint": {"enable": True, "interval": 3},
        "validation": {"enable": True, "freq": 2, "steps": 1},
    }
    merged = {n: defaults.get(n, {}) | sections.get(n, {}) for n in defaults | sections}
    return layouts.job(layout, "AdamW", **merged)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on one rank."""
    folder = tmp_path_factory.mktemp("straight")
    run_ranks(train, 1, recipe(folder, LAYOUTS[ALONE], 6))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Three steps under a layout, by its name; each is run once."""

    @cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        run_ranks(train, LAYOUTS[name].ranks, recipe(folder, LAYOUTS[name], 3))
        return folder

    return run


@pytest.mark.parametrize("layout", tiers(BITWISE, (ALONE, "FSDP 2", "PP 2, 1F1B")))
def test_same_layout_is_bitwise_the_same(
    layout: str, tmp_path: Path, saved: Callable[[str], Path]
) -> None:
    ranks = LAYOUTS[layout].ranks
    whole = run_ranks(train, ranks, recipe(tmp_path / "whole", LAYOUTS[layout], 6))[0]
    shutil.copytree(saved(layout), tmp_path / "halves")
    halves = run_ranks(train, ranks, recipe(tmp_path / "halves", LAYOUTS[layout], 6))[0]

    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    assert list(losses(tmp_path / "halves")) == [1, 2, 3, 4, 5, 6]
    assert all(torch.equal(halves[name], weight) for name, weight in whole.items())
    for key in ("grad_norm", "lr", "tokens", "validation_loss"):
        found, expected = (
            {row["step"]: row[key] for row in rows(tmp_path / name) if row.get(key) is not None}
            for name in ("halves", "whole")
        )
        # A stopped run validates at its last step, as a run that goes on does not.
        assert {step: found[step] for step in expected} == expected, key


GATE = [
    ("HSDP 2 x 2", "FSDP 2 x CP 2"),
    ("FSDP 2 x TP 2", "PP 2, ZBVZeroBubble"),
    (ALONE, "CP 2 x TP 2"),
    ("DDP 2", "PP 2, 1F1B"),
    ("FSDP 2", "PP 4, Interleaved1F1B"),
    ("FSDP 4", ALONE),
    ("TP 2", "TP 4"),
    ("PP 2, 1F1B", "PP 2, DualPipeV"),
    ("PP 4, Interleaved1F1B", "FSDP 2 x PP 2"),
    ("CP 2", "CP 4, ring, unbalanced"),
    ("FSDP 2 x TP 2 x PP 2", "FSDP 4"),
]
"""All axes are left and entered in these; the rest is for a release."""


@pytest.mark.parametrize(("before", "after"), tiers(PAIRS, DAILY, gate=GATE))
def test_another_layout_goes_on_with_the_same_run(
    before: str, after: str, tmp_path: Path, straight: Path, saved: Callable[[str], Path]
) -> None:
    shutil.copytree(saved(before), tmp_path, dirs_exist_ok=True)
    run_ranks(train, LAYOUTS[after].ranks, recipe(tmp_path, LAYOUTS[after], 6))
    is_the_same_run(tmp_path, straight)


def is_the_same_run(tmp_path: Path, straight: Path) -> None:
    """Another layout went on with it."""
    assert losses(tmp_path) == pytest.approx(losses(straight), rel=1e-5)
    for key, tolerance in {"grad_norm": 1e-4, "validation_loss": 1e-5}.items():
        found, expected = (
            {row["step"]: row[key] for row in rows(folder) if row.get(key) and row["step"] != 3}
            for folder in (tmp_path, straight)
        )
        assert found == pytest.approx(expected, rel=tolerance), key
    positions = [
        json.loads((folder / "checkpoint/step-6/train_state.json").read_text())["data"]
        for folder in (tmp_path, straight)
    ]
    assert positions[0] == positions[1]


def test_pairs_are_many_and_every_axis_is_left_and_entered() -> None:
    assert len(set(PAIRS)) >= 20
    for axis in ("pp", "replicate", "shard", "cp", "tp"):
        befores, afters = (
            {getattr(LAYOUTS[name], axis) for name in side} for side in zip(*PAIRS, strict=True)
        )
        assert min(befores) == min(afters) == 1
        assert max(befores) >= 2
        assert max(afters) >= 2


def test_lanes_carry_a_run_over_to_another_global_batch(tmp_path: Path) -> None:
    lanes = {"data": {"lanes": 16}}
    run_ranks(train, 1, recipe(tmp_path, LAYOUTS[ALONE], 3, **lanes))
    half = {"training": {"steps": 6, "global_batch_size": 4}}
    run_ranks(train, 2, recipe(tmp_path, LAYOUTS["FSDP 2"], 6, **lanes, **half))
    state = json.loads((tmp_path / "checkpoint/step-6/train_state.json").read_text())
    assert state["data"]["samples"] == 3 * 8 + 3 * 4


def test_curve_past_the_last_checkpoint_is_replaced_not_repeated(tmp_path: Path) -> None:
    run_ranks(train, 1, recipe(tmp_path, LAYOUTS[ALONE], 5))
    # As after a kill: step 5 was logged but its checkpoint does not exist.
    for path in (tmp_path / "checkpoint/step-5").iterdir():
        path.unlink()
    (tmp_path / "checkpoint/step-5").rmdir()
    first = losses(tmp_path)
    run_ranks(train, 1, recipe(tmp_path, LAYOUTS[ALONE], 6))
    second = losses(tmp_path)
    steps = [row["step"] for row in rows(tmp_path) if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert {step: second[step] for step in first} == first
