"""Devices: the table of peaks, and what a CPU answers."""

import gc
import json
import os
import weakref

import pytest
import torch

from tests import forked
from tests.tables import table
from torchtitan import device
from torchtitan.checks import load_job
from torchtitan.device import Device, peak_flops


def test_known_devices_have_the_peak_of_their_data_sheet_and_others_none_rather_than_a_guess():
    for peak, name in [("-", ""), *table(__file__, "devices.txt")]:
        assert peak_flops(name) == (None if peak == "-" else float(peak) * 1e12), name


def test_the_peak_depends_on_the_dtype():
    name = "NVIDIA H100 80GB HBM3"
    assert peak_flops(name, torch.float16) == 989e12
    assert peak_flops(name, torch.float32) == 67e12
    assert peak_flops(name, torch.float64) is None
    assert peak_flops("NVIDIA B200", torch.float32) is None


def test_pick_takes_the_cpu_where_there_is_no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.pick(local_rank=3) == Device("cpu")


def test_pick_takes_the_cuda_device_of_the_local_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.pick(local_rank=1) == Device("cuda", 1)
    with pytest.raises(RuntimeError, match="local rank 2 has no CUDA device: this machine shows 2"):
        device.pick(local_rank=2)


def test_a_cpu_answers_every_question():
    cpu = Device("cpu")
    cpu.make_current()
    cpu.synchronize()
    cpu.reset_memory_peak()
    assert cpu.name
    assert cpu.capability is None
    assert cpu.peak_flops() is None
    # A process that imported torch holds more than 50 MiB, and less than the machine has.
    assert 0.05 < cpu.memory_peak() < cpu.memory_capacity()


def grows():
    before = Device("cpu").memory_peak()
    filled = torch.ones(2**26, dtype=torch.uint8)
    return int(filled[-1] != 1 or Device("cpu").memory_peak() <= before + 0.05)


def test_memory_peak_sees_an_allocation_of_the_cpu(tmp_path):
    """In a process of its own: this one may have freed more, below its peak."""
    assert forked.run(grows, tmp_path).status == 0


def test_rng_state_comes_back():
    cpu = Device("cpu")
    state = cpu.rng_state()
    first = torch.rand(4)
    cpu.set_rng_state(state | {"cuda": torch.zeros(1)})
    assert torch.equal(torch.rand(4), first)


@pytest.mark.parametrize(
    ("cpuinfo", "is_slow"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512bw\n", True),
        ("flags\t\t: fpu avx512f avx512_bf16\n", False),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", False),
        ("Features\t: fp asimd\n", True),
        ("Features\t: fp asimd bf16\n", False),
        ("model name\t: unknown\n", False),
    ],
)
def test_bfloat16_on_a_cpu_without_it_is_noted(cpuinfo, is_slow, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(device, "PROC", tmp_path)
    monkeypatch.setattr("torchtitan.checks.limits.cpu_has_bfloat16", device.cpu_has_bfloat16)
    for kind, dtype in [("cpu", "bfloat16"), ("cpu", "float32"), ("cuda", "bfloat16")]:
        flags = ["--training.mixed_precision_param", dtype]
        told = " ".join(load_job(None, flags, None, kind).notices)
        is_noted = is_slow and (kind, dtype) == ("cpu", "bfloat16")
        assert ("training.mixed_precision_param" in told) == is_noted


def test_the_limits_of_all_control_groups_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(Device, "memory_capacity", lambda self: 8.0)
    for case, (groups, limits, expected) in enumerate(table(__file__, "control_groups.txt")):
        proc, folder = tmp_path / f"{case}/proc", tmp_path / f"{case}/cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text(f"SwapTotal: {2 * 2**20} kB\n")
        (proc / "self/cgroup").write_text(groups.strip("-"))
        for name, value in json.loads(limits).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"{value if value == 'max' else value * 2**30}\n")
        monkeypatch.setattr(device, "PROC", proc)
        monkeypatch.setattr(device, "CGROUPS", folder)
        assert Device("cpu").memory_limit() == float(expected), (groups, limits)


class Node:
    """An object that can be in a cycle, and be watched."""

    def __init__(self):
        self.itself = self


def test_garbage_of_every_generation_is_collected(monkeypatch):
    gc.freeze()  # the many objects of other tests
    gc.disable()
    try:
        old, young = Node(), Node()
        gc.collect()  # what survives is of the oldest generation
        gone = weakref.ref(old)
        del old
        for step in range(1, 21):
            device.collect_garbage(step, every=2)
            assert (gone() is None) == (step == 20), f"step {step}"
        gone = weakref.ref(young)
        young = Node()
        gone_young = weakref.ref(young)
        del young
        device.collect_garbage(22, every=2)
        assert gone() is not None
        assert gone_young() is None
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_stamps_of_cuda_measure_the_device_not_the_host():
    cuda = device.pick()
    matrix = torch.randn(8192, 8192, device=cuda.torch_device)
    begin = cuda.stamp()
    for _ in range(20):
        matrix = matrix @ matrix / 8192
    end = cuda.stamp()
    # 20 x 2 x 8192^3 FLOPs take milliseconds on any device, queueing them takes far less.
    assert cuda.seconds(begin, end) > 1e-3
    assert 0 < cuda.memory_peak() < cuda.memory_capacity()


@pytest.mark.parametrize("variable", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_allocator_settings_of_the_environment_win(variable, monkeypatch):
    for name in device.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "max_split_size_mb:100" if name == variable else "")
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    Device("cuda").make_current()
    expected = "max_split_size_mb:100" if variable else "expandable_segments:True"
    assert device.allocator_settings() == os.environ["PYTORCH_ALLOC_CONF"] == expected


def test_a_device_says_what_torch_should_be_told():
    assert Device("cuda", 3).torch_device == torch.device("cuda:3")
    assert (Device("cpu").backend, Device("cuda").backend) == ("gloo", "nccl")
