"""`scripts/gpu` without a GPU: its stages run, are kept one by one, and end in a page."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.gpu import page, peer
from tests.gpu.hosted import HostedGroup
from tests.tables import data
from torchtitan.device import Device

ROOT = Path(__file__).resolve().parents[1]


NOT_NEEDED = ("datasets", "wandb", "pandas", "pytest", "hypothesis")


def gpu(output, *arguments):
    """Run it where packages that a run on local text does not need cannot be imported."""
    missing = output / "missing"
    missing.mkdir()
    for name in NOT_NEEDED:
        (missing / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r}, name={name!r})")
    command = [str(ROOT / "scripts" / "gpu"), "--output", str(output), *arguments]
    path = f"{missing}{os.pathsep}{ROOT}"
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


QUICK = ["float32", "attention kernels", "CP 2, ring", "matrix product", "calibration"]
QUICK += ["8B: FSDP, grad-op"]
EACH_STAGE = [*QUICK, "trains", "toy: eager", "refresh of 4,096", "405B, TP", "real run"]
COUNTS = {"right": 2, "ranks": 1, "fast": 3, "many": 1, "systems": 2, "real": 1}
FEW = {"right": 2, "ranks": 1, "fast": 2, "systems": 1}


@pytest.mark.parametrize(
    ("cases", "workers", "counts"),
    [
        pytest.param(QUICK, 1, FEW, marks=pytest.mark.gate),
        pytest.param(EACH_STAGE, 2, COUNTS, marks=pytest.mark.slow),
    ],
    ids=["quick", "each stage"],
)
def test_cases_are_rehearsed_with_few_packages(cases, workers, counts, tmp_path):
    done = gpu(tmp_path, "--rehearse", "--workers", str(workers), "--only", *cases)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "page.md").read_text()
    for stage, count in counts.items():
        assert f"| {stage} | {count} | 0 | 0 |" in text, text
    assert "GiB planned" in text
    assert "`torchtitan plan --calibrate`: memory, GB/s" in text


@pytest.mark.slow
def test_all_is_rehearsed(tmp_path):
    done = gpu(tmp_path, "--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_device_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    query = tmp_path / "nvidia-smi"
    query.write_text("#!/bin/sh\nexit 9\n")
    query.chmod(0o755)
    done = gpu(tmp_path)
    assert done.returncode == 1
    assert "there is no CUDA device here; --rehearse" in done.stderr


def written(folder, stage, rows):
    """The page of a folder with these results of a stage."""
    (folder / f"{stage}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "environment.json").write_text(json.dumps({"device": "D", "command": "c"}))
    return page.write(folder)


def test_a_later_result_replaces_an_earlier_one(tmp_path):
    """And a figure of a table is that of the file."""
    row = {"case": "8B: compiled", "seconds": 1.0, "traceback": "", "error": None}
    figures = {"tokens/s": 200.0, "quartiles": [90.0, 110.0], "GiB": 1.0, "warm-up s": 2.0}
    later = row | {"figures": {**figures, "TFLOP/s": 3.0}}
    rows = [row | {"error": "RuntimeError: x", "figures": {}}, later]
    text = written(tmp_path, "fast", rows)
    assert "| fast | 1 | 0 | 0 |" in text
    assert "| compiled | 200 (90 to 110) | 1.000 |" in text
    assert "RuntimeError" not in text


def test_systems_have_tables(tmp_path):
    """A rank that ran out of memory is in them, as is what is planned of it."""
    given = data(__file__)
    rest = {"error": None, "seconds": 1.0}
    rows = [{"case": case, "figures": found, **rest} for case, found in given["figures"].items()]
    text = written(tmp_path, "systems", rows)
    for line in given["lines"]:
        assert line in text, text


PEER = data(__file__)["peer"]
"""A wheel that stands for TorchTitan's, which needs a GPU."""


def test_a_peer_is_installed_beside_this_project(tmp_path, monkeypatch):
    """And runs without it; where there is no wheel, that is said."""
    monkeypatch.setattr(peer, "WHEELS", tmp_path)
    monkeypatch.setattr(peer, "find_spec", lambda name: name == "triton")
    device = Device("cpu")
    assert "pip download" in peer.check("peer: bf16", device, "aot_eager")["left out"]
    with zipfile.ZipFile(tmp_path / "torchtitan-0.2.2-py3-none-any.whl", "w") as wheel:
        for name, text in PEER.items():
            wheel.writestr(name, text)
    speeds = iter((6000, 9000))
    monkeypatch.setattr(peer, "planned", lambda *_: {"planned GiB": 2.0})
    monkeypatch.setattr(peer, "ours", lambda *_: [peer.Row(4, 2.0, next(speeds))])
    figures = peer.check("peer: bf16", device, "aot_eager")
    assert figures.pop("spread") == [2.0, 3.0]
    assert figures == {
        "tokens/s": 7500,
        "tokens/s of TorchTitan": 3000,
        "ratio": 2.5,
        "GiB": 2.0,
        "GiB of TorchTitan": 4.5,
        "planned GiB": 2.0,
    }
    rows = [{"case": "peer: bf16", "error": None, "figures": figures | {"spread": [2.0, 3.0]}}]
    line = "| peer: bf16 | 7,500 | 3,000 | 2.500 (2.000 to 3.000) | - | 2.0 | 4.5 | 2.0 (+0.0%) |"
    assert line in written(tmp_path, "peer", rows)


def test_no_recipe_can_choose_the_hosted_group():
    """It is for tests: the package knows nothing of it."""
    assert HostedGroup.__module__ == "tests.gpu.hosted"
    files = (ROOT / "torchtitan").rglob("*.py")
    assert not [path for path in files if "hosted" in path.read_text(encoding="utf-8")]
