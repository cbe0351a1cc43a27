"""Files of hardware: those of the package are sound, and every mistake in one's own is named."""

import os
import re
from pathlib import Path

import pytest
import torch

from torchtitan.checks import load_job
from torchtitan.config import RecipeError
from torchtitan.device import peak_flops
from torchtitan.plan.hardware import FOLDER, find_hardware, hardware_names
from torchtitan.plan.hardware import calibrate as measured
from torchtitan.plan.hardware.calibrate import calibrate
from torchtitan.tools.cli import main

NAMES = ["a100-40", "a100-80", "b200", "cpu", "gb200", "h100", "h100-96", "h200", "mi300x"]
ROOT = Path(__file__).parents[2]


def test_the_package_has_the_usual_hardware():
    assert hardware_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_the_package_is_sound(name):
    hardware = find_hardware(name)
    assert hardware.name == name
    assert hardware.products
    assert hardware.attention
    if hardware.device and name != "cpu":
        for dtype in (torch.bfloat16, torch.float32):
            if peak := peak_flops(hardware.device, dtype):
                assert hardware.peak(dtype) == peak


def test_hardware_with_a_known_device_has_its_peak():
    assert find_hardware("h100").peak(torch.bfloat16) == 989e12
    assert find_hardware("a100-80").peak(torch.float8_e4m3fn) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h2000", "did you mean h200?"),
        ("mi300", "did you mean mi300x?"),
        ("tpu", "wanted a file or a name: a100-40, a100-80, b200"),
        ("missing/h100.toml", "did you mean h100?"),
    ],
)
def test_unknown_hardware_is_refused_with_the_nearest(name, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        find_hardware(name)


def test_a_file_of_ones_own_is_read(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((FOLDER / "h100.toml").read_text())
    assert find_hardware(str(path)) == find_hardware("h100")


@pytest.mark.gate
def test_calibration_writes_a_file_of_this_machine(tmp_path):
    recipe = ROOT / "train_configs/debug_model.toml"
    job = load_job(recipe, ["--model.tokenizer_path", "none"], 2, "cpu").config
    hardware = calibrate(job, 2, tmp_path / "mine.toml")
    assert hardware == find_hardware(str(tmp_path / "mine.toml"))
    assert (hardware.device_type, hardware.cores) == ("cpu", len(os.sched_getaffinity(0)))
    assert {(rate.n, rate.k) for rate in hardware.products} >= {(768, 256), (256, 768)}
    assert hardware.attention[0].head_dim == 16
    assert hardware.node != find_hardware("cpu").node


def test_a_measurement_that_cannot_be_is_refused_by_name(tmp_path, monkeypatch):
    own = {"memory_bandwidth": 9.0, "peaks": {"float32": 0.1}, "products": [], "attention": []}
    links = iter([[own | {"host_us": 1.0, "launch_us": 1.0}], [{"bandwidth": 1.0, "latency": 1e9}]])
    monkeypatch.setattr(measured, "run_ranks", lambda *_, **__: next(links))
    job = load_job(ROOT / "train_configs/debug_model.toml", [], 2, "cpu").config
    path = tmp_path / "mine.toml"
    with pytest.raises(RecipeError, match=re.escape("--calibrate: node.latency: measured 1e+09")):
        calibrate(job, 2, path)
    assert not path.exists()


@pytest.mark.gate
def test_calibration_by_command(tmp_path, says):
    recipe, path = str(ROOT / "train_configs/debug_model.toml"), str(tmp_path / "mine.toml")
    assert main(["plan", recipe, "--calibrate", "--output", path]) == 0
    assert "tokens/s: " in says("plan", recipe, "--hardware", path)
    assert find_hardware(path).cores == 1  # all that there are, as one
