"""Measurement of the machine that this process runs on, written as a file of hardware.

Products and attention are those of a recipe, with fewer rows where they would take long. Links are
measured among local ranks; a link between nodes cannot be, and is that of the nearest hardware.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan.device import GIB, Device, pick
from torchtitan.estimate.expansion import expand
from torchtitan.estimate.fake_rank import record
from torchtitan.estimate.hardware import Hardware, dtype_name, find_hardware, hardware_names
from torchtitan.estimate.kernel_time import attention_share
from torchtitan.estimate.recording import Kernel
from torchtitan.job import JobConfig
from torchtitan.local_ranks import run_ranks

PRODUCTS = 6
"""Number of products that are measured: the largest by their FLOPs in a step."""
LONGEST = 0.3
"""Seconds of a kernel above which fewer rows are measured."""
MESSAGE = 2**24
"""Bytes of the whole tensor of a collective on a CPU; on CUDA 16 times as many."""


def calibrate(job: JobConfig, ranks: int, path: Path) -> Hardware:
    """Measure this machine for a recipe of `ranks`, and write it to `path`."""
    import tomlkit

    device = pick()
    near = _nearest(device)
    source = record(job, ranks, device_type=device.type)
    step = expand(source, 1)
    kernels = [kernel for segment in step.segments for kernel in segment.kernels]
    products = [*_products(kernels, device)]
    values = near.model_dump(exclude_none=True) | {
        "name": path.stem,
        "description": f"{device.name}, measured; between nodes as {near.name}",
        "source": f"torchtitan plan --calibrate, torch {torch.__version__}, {date.today()}",
        "device": device.name,
        "device_type": device.type,
        "memory_gib": round(device.memory_capacity(), 2),
        "memory_bandwidth": _memory_bandwidth(device),
        "multiprocessors": _multiprocessors(device),
        "ranks_per_node": _local_ranks(device) if device.type == "cuda" else near.ranks_per_node,
        "peaks": _peaks(products, near, device),
        "products": products,
        "attention": [*_attention(kernels, device)] or near.model_dump()["attention"],
        **_overheads(device),
    }
    if (found := _local_ranks(device)) > 1:
        size = MESSAGE * (16 if device.type == "cuda" else 1)
        values["node"] = run_ranks(_link, found, size, device=device.type)[0]
    hardware = Hardware.model_validate(values)
    path.write_text(tomlkit.dumps(hardware.model_dump(exclude_none=True)), encoding="utf-8")
    return hardware


def _nearest(device: Device) -> Hardware:
    """Return hardware with the numbers that are not measured."""
    known = map(find_hardware, hardware_names())
    other = "cpu" if device.type == "cpu" else "h100"
    return next((each for each in known if each.device == device.name), find_hardware(other))


def _seconds(act: Callable[[], object], device: Device, times: int = 5) -> float:
    """Return the shortest time of `act` on the device, since others may use the machine too."""
    act()
    taken = []
    for _ in range(times):
        begin = device.stamp()
        act()
        taken.append(device.seconds(begin, device.stamp()))
    return max(min(taken), 1e-7)


def _fitting(act: Callable[[int], Callable[[], object]], rows: int, device: Device) -> int:
    """Return the rows with which `act` does not take long, at most `rows`."""
    few = min(rows, 128)
    taken = _seconds(act(few), device, 1)
    while few < rows and taken * 2 <= LONGEST:
        few = min(few * 2, rows)
        taken = _seconds(act(few), device, 1)
    return few


def _products(kernels: list[Kernel], device: Device) -> Iterator[dict[str, Any]]:
    """Yield the rates of the products that take the most FLOPs."""
    flops = Counter[tuple[torch.dtype, int, int, int]]()
    for kernel in kernels:
        if kernel.flops and kernel.name == "aten.mm" and all(map(math.prod, kernel.shapes[:2])):
            (m, k), (_, n) = kernel.shapes[:2]
            flops[kernel.dtype, m, n, k] += kernel.flops
    for (dtype, m, n, k), _ in flops.most_common(PRODUCTS):
        like = {"device": device.torch_device, "dtype": dtype}
        weight = torch.randn(k, n, **like)  # type: ignore[call-overload]

        def product(
            rows: int, k: int = k, like: Any = like, weight: torch.Tensor = weight
        ) -> Callable[[], object]:
            x = torch.randn(rows, k, **like)
            return lambda: x @ weight

        rows = _fitting(product, m, device)
        rate = 2 * rows * n * k / _seconds(product(rows), device) / 1e12
        yield {"dtype": dtype_name(dtype), "m": rows, "n": n, "k": k, "tflops": _rounded(rate)}


def _attention(kernels: list[Kernel], device: Device) -> Iterator[dict[str, Any]]:
    """Yield the rates of causal attention, converted to those of a long sequence."""
    for kernel in kernels:
        if "attention" not in kernel.name or kernel.name.endswith("backward"):
            continue
        (_, heads, length, size), dtype = kernel.shapes[0], kernel.dtype

        def attend(tokens: int, backward: bool = False) -> Callable[[], object]:
            like = {"device": device.torch_device, "dtype": dtype}  # noqa: B023
            given = [torch.randn(1, heads, tokens, size, **like) for _ in range(3)]  # type: ignore[call-overload] # noqa: B023

            def act() -> object:
                q, k, v = inputs = [x.requires_grad_() for x in given]
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return torch.autograd.grad(out, inputs, out) if backward else out

            return act

        tokens = _fitting(lambda tokens: attend(tokens, True), length, device)
        forward = _seconds(attend(tokens), device)
        backward = max(_seconds(attend(tokens, True), device) - forward, forward)
        flops = 2 * heads * tokens**2 * size / attention_share(tokens) / 1e12
        yield {
            "head_dim": size,
            "forward": _rounded(flops / forward),
            "backward": _rounded(2.5 * flops / backward),
        }
        return


def _peaks(
    products: list[dict[str, Any]], near: Hardware, device: Device
) -> dict[str, float | None]:
    """Return the peaks of the nearest hardware, if it is this device; else the largest rates."""
    if near.device == device.name:
        return near.peaks.model_dump()
    found: dict[str, float | None] = {}
    for rate in products:
        found[rate["dtype"]] = max(rate["tflops"], found.get(rate["dtype"]) or 0.0)
    if not found:
        found["float32"] = near.peaks.float32
    for name in ("bfloat16", "float32"):
        if peak := device.peak_flops(getattr(torch, name)):
            found[name] = peak / 1e12
    return found


def _memory_bandwidth(device: Device) -> float:
    elements = 2**26 if device.type == "cuda" else 2**24
    x = torch.randn(elements, device=device.torch_device)
    out = torch.empty_like(x)
    return _rounded(2 * x.nbytes / _seconds(lambda: out.copy_(x), device) / 1e9)


def _overheads(device: Device) -> dict[str, float]:
    """Return the time of a small kernel, of the host for an operator, and memory outside."""
    x = torch.zeros(8, device=device.torch_device)
    count = 200

    def issue() -> None:
        for _ in range(count):
            torch.add(x, x)

    issue()
    device.synchronize()
    begin = time.perf_counter()
    issue()
    host = (time.perf_counter() - begin) / count
    device.synchronize()
    found = {"host_us": max(_rounded(1e6 * host), 0.01)}
    if device.type == "cpu":
        return found | {"launch_us": found["host_us"]}
    free, total = torch.cuda.mem_get_info(device.index)
    outside = (total - free - torch.cuda.memory_reserved(device.index)) / GIB
    return found | {"outside_allocator_gib": _rounded(outside)}


def _multiprocessors(device: Device) -> int:
    if device.type == "cpu":
        return 1  # of products on a CPU the threads share each tile
    return int(torch.cuda.get_device_properties(device.index).multi_processor_count)


def _local_ranks(device: Device) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else 2


def _link(size: int) -> dict[str, float]:
    """Return the bandwidth and latency of the link between the ranks of a group."""
    device, ranks = pick(dist.get_rank()), dist.get_world_size()
    device.make_current()
    whole, word = (torch.zeros(elements, device=device.torch_device) for elements in (size // 4, 1))
    large = _seconds(lambda: dist.all_reduce(whole), device)
    small = _seconds(lambda: dist.all_reduce(word), device, 20)
    return {
        "bandwidth": _rounded(2 * size * (ranks - 1) / ranks / large / 1e9),
        "latency": max(_rounded(1e6 * small / (2 * (ranks - 1))), 0.01),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
