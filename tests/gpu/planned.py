"""The plan of a step, to stand beside its measurement; and the calibration of a device."""

import tempfile
from pathlib import Path
from typing import Any

from torchtitan.device import GIB, Device
from torchtitan.estimate.hardware import Hardware, find_hardware, hardware_names
from torchtitan.estimate.hardware.calibrate import calibrate
from torchtitan.estimate.plan import plan
from torchtitan.job import JobConfig


def planned(job: JobConfig, ranks: int, rank: int, device: Device) -> dict[str, Any]:
    """Return GiB that a rank reserves and, on hardware that has a file, tokens per second."""
    found = plan(job, ranks, hardware_of(device), device_type=device.type)
    stage = rank * job.degrees(ranks).pp // ranks
    kind = next(each for each in found.kinds if stage in each.stage_ranks)
    figures = {"planned GiB": kind.memory.peak_reserved / GIB}
    if found.time is not None:
        figures["planned tokens/s"] = found.time.tokens_per_second_per_device
    return figures


def hardware_of(device: Device) -> Hardware | None:
    """Return the hardware of a device, if its name is in a file."""
    known = map(find_hardware, hardware_names())
    return next((each for each in known if each.device == device.name), None)


def calibration(job: JobConfig, device: Device) -> dict[str, Any]:
    """Return what `torchtitan plan --calibrate` finds, beside the numbers of the file."""
    with tempfile.TemporaryDirectory() as folder:
        found = calibrate(job, 1, Path(folder) / "measured.toml")
    figures: dict[str, Any] = {
        "memory, GB/s": found.memory_bandwidth,
        "launch, us": found.launch_us,
    }
    for each in found.products:
        figures[f"{each.dtype} {each.m} x {each.n} x {each.k}, TFLOP/s"] = each.tflops
    for rate in found.attention:
        heads = f"attention with heads of {rate.head_dim}"
        figures |= {f"{heads}, forward": rate.forward, f"{heads}, backward": rate.backward}
    if (file := hardware_of(device)) is not None:
        figures["memory in the file, GB/s"] = file.memory_bandwidth
    return figures
