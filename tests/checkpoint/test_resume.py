"""A run that is stopped and started again is the run that was never stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import losses, rows, train
from torchtitan.job import JobConfig

# (ranks, copies): 1 rank, DDP, FSDP, HSDP
LAYOUTS = {"1": (1, 1), "DDP 2": (2, 2), "FSDP 2": (2, 1), "FSDP 4": (4, 1), "HSDP 2x2": (4, 2)}
OTHERS = [
    ("1", "FSDP 2"),
    ("FSDP 2", "1"),
    ("1", "DDP 2"),
    ("DDP 2", "FSDP 4"),
    ("FSDP 4", "FSDP 2"),
    ("FSDP 2", "HSDP 2x2"),
    ("HSDP 2x2", "1"),
]


def recipe(folder: Path, layout: str, steps: int, **sections: dict[str, Any]) -> JobConfig:
    defaults: dict[str, dict[str, Any]] = {
        "training": {"steps": steps, "max_norm": 0.5},
        "lr_scheduler": {"total_steps": 6},
        "checkpoint": {"enable": True, "interval": 3},
        "validation": {"enable": True, "freq": 2, "steps": 1},
        "parallelism": {"data_parallel_replicate_degree": LAYOUTS[layout][1]},
    }
    merged = {n: defaults.get(n, {}) | sections.get(n, {}) for n in defaults | sections}
    return tiny.job(folder, **merged)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_ranks(train, 1, recipe(folder, "1", 6))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_layout_is_bitwise_the_same(layout: str, tmp_path: Path) -> None:
    ranks = LAYOUTS[layout][0]
    whole = run_ranks(train, ranks, recipe(tmp_path / "whole", layout, 6))[0]
    run_ranks(train, ranks, recipe(tmp_path / "halves", layout, 3))
    halves = run_ranks(train, ranks, recipe(tmp_path / "halves", layout, 6))[0]

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


@pytest.mark.parametrize(("before", "after"), OTHERS)
def test_another_layout_goes_on_with_the_same_data(
    before: str, after: str, tmp_path: Path, uninterrupted: Path
) -> None:
    run_ranks(train, LAYOUTS[before][0], recipe(tmp_path, before, 3))
    run_ranks(train, LAYOUTS[after][0], recipe(tmp_path, after, 6))

    expected = losses(uninterrupted)
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)
    positions = [
        json.loads((folder / "checkpoint/step-6/train_state.json").read_text())["data"]
        for folder in (tmp_path, uninterrupted)
    ]
    assert positions[0] == positions[1]


def test_lanes_carry_a_run_over_to_another_global_batch(tmp_path: Path) -> None:
    lanes = {"data": {"lanes": 16}}
    run_ranks(train, 1, recipe(tmp_path, "1", 3, **lanes))
    half = {"training": {"steps": 6, "global_batch_size": 4}}
    run_ranks(train, 2, recipe(tmp_path, "FSDP 2", 6, **lanes, **half))
    state = json.loads((tmp_path / "checkpoint/step-6/train_state.json").read_text())
    assert state["data"]["samples"] == 3 * 8 + 3 * 4


def test_curve_past_the_last_checkpoint_is_replaced_not_repeated(tmp_path: Path) -> None:
    run_ranks(train, 1, recipe(tmp_path, "1", 5))
    # As after a kill: step 5 was logged but its checkpoint does not exist.
    for path in (tmp_path / "checkpoint/step-5").iterdir():
        path.unlink()
    (tmp_path / "checkpoint/step-5").rmdir()
    first = losses(tmp_path)
    run_ranks(train, 1, recipe(tmp_path, "1", 6))
    second = losses(tmp_path)
    steps = [row["step"] for row in rows(tmp_path) if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert {step: second[step] for step in first} == first
