"""Devices: the table of peaks, and what a CPU answers."""

import pytest
import torch

from torchtitan import device
from torchtitan.device import Device, peak_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GH200 144G HBM3e", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA A30", 165),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI300X OAM", 1307.4),
        ("AMD Instinct MI325X", 1307.4),
        ("AMD Instinct MI250X / MI250", 191.5),
    ],
)
def test_known_devices_have_the_dense_bf16_peak_of_their_data_sheet(name, tflops):
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H100 64GB HBM2",
        "NVIDIA H20",
        "NVIDIA A10G",
        "NVIDIA A100X",
        "NVIDIA L40G",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "nvidia l40s",
        "Tesla V100-SXM2-32GB",
        "AMD Instinct MI100",
        "AMD Radeon Graphics",
        "AMD EPYC 7763 64-Core Processor",
    ],
)
def test_unknown_devices_have_no_peak_rather_than_a_guess(name):
    assert peak_flops(name) is None


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


def test_a_device_says_what_torch_should_be_told():
    assert Device("cpu").torch_device == torch.device("cpu")
    assert Device("cuda", 3).torch_device == torch.device("cuda:3")
    assert (Device("cpu").backend, Device("cuda").backend) == ("gloo", "nccl")


def test_a_cpu_answers_every_question():
    cpu = Device("cpu")
    cpu.make_current()
    cpu.synchronize()
    cpu.reset_memory_peak()
    assert cpu.name
    assert cpu.capability is None
    assert cpu.peak_flops() is None
    assert cpu.allocation_retries() == 0
    # A process that imported torch holds more than 50 MiB, and less than the machine has.
    assert 0.05 < cpu.memory_peak() < cpu.memory_capacity()


def test_memory_peak_sees_an_allocation_of_the_cpu():
    before = Device("cpu").memory_peak()
    # Beyond what earlier tests may have freed below the peak.
    size = int(before * 2**30) + 2**26
    filled = torch.ones(size, dtype=torch.uint8)
    assert filled[-1] == 1
    assert Device("cpu").memory_peak() > before + 0.05


def test_stamps_of_a_cpu_are_read_from_the_clock():
    clock = iter([2.0, 5.5]).__next__
    cpu = Device("cpu")
    assert cpu.seconds(cpu.stamp(clock), cpu.stamp(clock)) == 3.5


def test_rng_state_comes_back():
    cpu = Device("cpu")
    state = cpu.rng_state()
    first = torch.rand(4)
    cpu.set_rng_state(state | {"cuda": torch.zeros(1)})
    assert torch.equal(torch.rand(4), first)


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
