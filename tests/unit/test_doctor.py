"""`torchtitan doctor`: what is reported, and its exit status."""

import importlib.metadata
import json
import subprocess
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from torchtitan.device import Device
from torchtitan.tools import doctor


def found(findings):
    return {each.name: each for each in findings}


def test_this_machine_can_train(says):
    lines = says("doctor").splitlines()
    headings = [line for line in lines if not line.startswith(" ")]
    assert headings[:4] == ["versions:", "devices:", "backends:", "features:"]
    rows = {line.split()[1]: line.split()[0] for line in lines if line.startswith(" ")}
    assert rows["torch"] == rows["gloo"] == "ok"
    assert lines[-1].startswith("ready to train on ")


def test_as_json(says):
    rows = {row["name"]: row for row in json.loads(says("doctor", "--json"))}
    assert rows["torch"] == {
        "section": "versions",
        "name": "torch",
        "state": "ok",
        "detail": torch.__version__,
        "fix": "",
    }
    assert not dist.is_initialized()


def test_a_missing_package_has_its_command(monkeypatch):
    monkeypatch.setattr(doctor, "is_installed", lambda module: False)
    rows = found(doctor.features(Device("cpu")))
    for name, command in (
        ("s3fs", 'pip install "s3fs>=2025.3"'),
        ("pillow", 'pip install "pillow>=11"'),
    ):
        assert (rows[name].state, rows[name].fix) == ("missing", command)


@pytest.mark.parametrize(
    ("version", "detail"), [("9.9", "9.9; wanted <2.14,>=2.11"), (None, "not installed")]
)
def test_a_required_package_decides_the_status(version, detail, monkeypatch, says):
    def versions(name):
        if name != "torch":
            return importlib.metadata.version(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(doctor, "version", versions)
    *lines, last = says("doctor", status=1).splitlines()
    assert last == "not ready to train; first mend torch"
    [line] = [line for line in lines if line.startswith("  error")]
    assert line.split(maxsplit=2)[1:] == ["torch", f'{detail}  -> pip install "torch>=2.11,<2.14"']


def test_a_backend_that_fails_decides_the_status(monkeypatch, says):
    error = RuntimeError("no network interface\nand where")
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=error))
    assert "  error    gloo                 no network interface\n" in says("doctor", status=1)


def nvidia(driver, monkeypatch):
    """A machine with that driver, or none."""
    done = subprocess.CompletedProcess((), 0, f"{driver}\n")
    monkeypatch.setattr("shutil.which", lambda name: name if driver else None)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: done)
    return lambda: found(doctor.devices(Device("cpu")))["cuda"]


@pytest.mark.parametrize(
    ("driver", "cuda", "detail", "fix"),
    [
        ("", None, "no NVIDIA driver was found", ""),
        ("570.1", None, "torch is built for the CPU", "--index-url"),
        ("570.1", "13.0", "torch for CUDA 13.0 finds no device with driver 570.1", "nvidia-smi"),
    ],
)
def test_why_there_is_no_cuda(driver, cuda, detail, fix, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    finding = nvidia(driver, monkeypatch)()
    assert isinstance(finding, doctor.Finding)
    assert finding.state == "missing"
    assert detail in finding.detail
    assert fix in finding.fix


def test_a_cuda_device_is_shown(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(Device, "name", "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(Device, "memory_capacity", lambda self: 79.1)
    nvidia("570.1", monkeypatch)
    rows = found(doctor.devices(Device("cuda")))
    assert rows["torch for"].detail == "CUDA 12.8, driver 570.1"
    assert rows["cuda:0"].detail == "NVIDIA H100 80GB HBM3, 79 GiB"


@pytest.mark.parametrize(
    ("capability", "devices", "states"),
    [
        ((8, 0), 1, {"float8": "missing", "mxfp8": "missing", "symmetric memory": "missing"}),
        ((9, 0), 2, {"float8": "ok", "mxfp8": "missing", "symmetric memory": "ok"}),
        ((10, 0), 2, {"float8": "ok", "mxfp8": "ok", "symmetric memory": "ok"}),
    ],
)
def test_what_a_cuda_device_can_do(capability, devices, states, monkeypatch):
    monkeypatch.setattr(Device, "capability", capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    rows = found(doctor.features(Device("cuda")))
    assert {name: rows[name].state for name in states} == states


def test_little_shared_memory_is_reported(monkeypatch):
    for free, state in ((64 * 2**20, "missing"), (2 * 2**30, "ok")):
        usage = type("Usage", (), {"free": free})
        monkeypatch.setattr("shutil.disk_usage", lambda path, usage=usage: usage)
        assert found(doctor.system(Device("cuda")))["shared memory"].state == state
