"""Measurement of the machine that this process runs on, written as a file of hardware.

Products and attention are those of a recipe, with fewer rows where they would take long. Links are
measured among local ranks; a link between nodes cannot be, and is that of the nearest hardware.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from torchtitan.config import RecipeError
from torchtitan.device import GIB, Device, pick
from torchtitan.job import JobConfig
from torchtitan.local_ranks import run_ranks
from torchtitan.plan.expansion import expand
from torchtitan.plan.fake_rank import record
from torchtitan.plan.hardware import (
    LEAST_TFLOPS,
    Hardware,
    dtype_name,
    find_hardware,
    hardware_names,
)
from torchtitan.plan.kernel_time import attention_share
from torchtitan.plan.recording import DISPATCH, Kernel, KernelRecorder, Message

PRODUCTS = 6
"""Number of products that are measured: the largest by their FLOPs in a step."""
LONGEST = 0.3
"""Seconds of a kernel above which fewer rows are measured."""
MESSAGES = {"cpu": 2**22, "cuda": 2**28}
"""Bytes of the whole tensor of a collective."""
MOST_RANKS = 8
"""Number of ranks on a CPU up to which as many send as in a run."""


def calibrate(job: JobConfig, ranks: int, path: Path) -> Hardware:
    """Measure this machine for a recipe of `ranks`, and write it to `path`.

    Raises:
        RecipeError: if what was measured cannot be, as where others keep the machine busy.
    """
    import tomlkit

    device = pick()
    near = _nearest(device)
    source = record(job, ranks, device_type=device.type)
    kernels = [kernel for segment in expand(source, 1).segments for kernel in segment.kernels]
    if device.type == "cpu":
        if ranks == 1:  # as in a run, it computes on all cores, which count as one
            cores, own = 1, _of_device(kernels, near)
        else:  # with a rank on each core, as in a run, and a thread in each
            cores = len(os.sched_getaffinity(0))
            own, *_ = run_ranks(_of_device, min(cores, ranks), kernels, near, device="cpu")
        own |= {"cores": cores, "multiprocessors": 1, "ranks_per_node": near.ranks_per_node}
        local_ranks = min(max(ranks // 2 * 2, 2), MOST_RANKS)
    else:
        own, local_ranks = _of_device(kernels, near), torch.cuda.device_count()
    values = near.model_dump(exclude_none=True) | {
        "name": path.stem,
        "description": f"{device.name}, measured; between nodes as {near.name}",
        "source": f"torchtitan plan --calibrate, torch {torch.__version__}, {date.today()}",
        "device": device.name,
        "device_type": device.type,
        "memory_gib": round(device.memory_capacity(), 2),
        **own,
    }
    if local_ranks > 1:
        size, turns = MESSAGES[device.type], max(local_ranks / own.get("cores", local_ranks), 1.0)
        values["node"] = run_ranks(_link, local_ranks, size, turns, device=device.type)[0]
    try:
        hardware = Hardware.model_validate(values)
    except ValidationError as error:
        raise RecipeError(
            [
                f"--calibrate: {'.'.join(map(str, each['loc']))}: measured {each['input']:g}, "
                f"{str(each['ctx']['error']).partition(';')[0]}; try again on an idle machine"
                for each in error.errors()
            ]
        ) from None
    path.write_text(tomlkit.dumps(hardware.model_dump(exclude_none=True)), encoding="utf-8")
    return hardware


def _of_device(kernels: list[Kernel], near: Hardware) -> dict[str, Any]:
    """Measure the device of this process: products, attention, memory and overheads."""
    device = pick()
    products = [*_products(kernels, device)]
    found = {
        "memory_bandwidth": _memory_bandwidth(device),
        "peaks": _peaks(products, near, device),
        "products": products,
        "attention": [*_attention(kernels, device)] or near.model_dump()["attention"],
        **_overheads(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device.index)
        found["multiprocessors"] = properties.multi_processor_count
        found["ranks_per_node"] = torch.cuda.device_count()
    return found


def _nearest(device: Device) -> Hardware:
    """Return hardware with the numbers that are not measured."""
    known = map(find_hardware, hardware_names())
    other = "cpu" if device.type == "cpu" else "h100"
    return next((each for each in known if each.device == device.name), find_hardware(other))


def _seconds(act: Callable[[], object], device: Device, times: int = 5) -> float:
    """Return the shortest time of `act` on the device, since others may use the machine too."""
    return min(_times(act, device, times))


def _times(act: Callable[[], object], device: Device, times: int) -> list[float]:
    act()
    taken = []
    for _ in range(times):
        begin = device.stamp()
        act()
        taken.append(max(device.seconds(begin, device.stamp()), 1e-7))
    return taken


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
        yield {"dtype": dtype_name(dtype), "m": rows, "n": n, "k": k, "tflops": _rate(rate)}


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
        rates = {"forward": _rate(flops / forward), "backward": _rate(2.5 * flops / backward)}
        yield {"head_dim": size} | rates
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
    """Return the time of the host for an operator, without and with DTensor, and memory outside."""
    x = torch.zeros(8, device=device.torch_device, requires_grad=True)
    plain = _host_us(x)
    found = {"host_us": plain}
    if dist.is_initialized() and dist.get_world_size() > 1:
        found["dispatch_us"] = _dispatch_us(device)
    if device.type == "cpu":
        return found | {"launch_us": 0.01}  # the host computes
    free, total = torch.cuda.mem_get_info(device.index)
    outside = (total - free - torch.cuda.memory_reserved(device.index)) / GIB
    return found | {"outside_allocator_gib": _rounded(outside)}


def _host_us(x: Tensor) -> float:
    """Return the microseconds of the host for an operator on `x`, in a forward and its backward."""
    count = 50

    def issue() -> float:
        begin, y = time.perf_counter(), x
        for _ in range(count):
            y = y * x
        torch.autograd.grad(y, x, torch.ones_like(y))
        return time.perf_counter() - begin

    issue()
    # Of a product there are two in the backward, and the sum of what both give to `x`.
    return max(_rounded(1e6 * min(issue() for _ in range(10)) / (4 * count)), 0.01)


def _dispatch_us(device: Device) -> float:
    """Return the microseconds of the host for an operator on a DTensor in tensor parallelism."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = DeviceMesh(device.type, list(range(dist.get_world_size())))
    x, up, down = (
        DTensor.from_local(torch.zeros(shape, device=device.torch_device), mesh, [Shard(dim)])
        for shape, dim in (((1, 8, 8), 1), ((8, 8), 0), ((8, 8), 1))
    )
    for each in (x, up, down):
        each.requires_grad_()

    def act() -> None:
        hidden: Any = F.silu(F.linear(x.redistribute(mesh, [Replicate()]), up))
        hidden = F.linear(hidden, down)
        out: Tensor = hidden.redistribute(mesh, [Shard(1)])
        torch.autograd.grad(out.sum(), [x, up, down])

    act()
    with KernelRecorder() as recorder:
        act()
    messages = sum(isinstance(each, Message) for each in recorder.recording.events)
    word = torch.zeros(1, device=device.torch_device)
    alone = median(_times(lambda: dist.all_reduce(word), device, 50))
    seconds = median(_times(act, device, 50)) - messages * alone
    return max(_rounded(1e6 * seconds / recorder.recording.events.count(DISPATCH)), 0.01)


def _link(size: int, turns: float) -> dict[str, float]:
    """Return the bandwidth and latency of the link between ranks.

    On a CPU they send in pairs, between products as in a step, whose time is not counted.
    """
    device, ranks = pick(dist.get_rank()), dist.get_world_size()
    device.make_current()
    group = dist.group.WORLD
    if in_pairs := device.type == "cpu":
        pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
        ranks, group = 2, pairs[dist.get_rank() // 2]
    seconds = []
    for elements in (size // 4, 1):
        x = torch.zeros(elements, device=device.torch_device)
        act = partial(dist.all_reduce, x, group=group)
        each = _between_products(act, turns) if in_pairs else median(_times(act, device, 20))
        seconds.append(each)
    large, small = seconds
    if in_pairs:
        large = max(large - small, small)
    return {
        "bandwidth": _rounded(2 * size * (ranks - 1) / ranks / large / 1e9),
        "latency": max(_rounded(1e6 * small / (2 * (ranks - 1))), 0.01),
    }


def _between_products(act: Callable[[], object], turns: float, times: int = 40) -> float:
    """Return the mean time of `act` between products, of which each rank has its turn."""
    matrix, products = torch.ones(256, 256), 0.0
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        start = time.thread_time()
        for _ in range(8):
            matrix @ matrix
        products += time.thread_time() - start
        act()
    return max((time.perf_counter() - begin - turns * products) / times, 1e-5)


def _rate(tflops: float) -> float:
    """Return a rate in the range of a hardware file, below which a tiny product may be."""
    return max(_rounded(tflops), LEAST_TFLOPS)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
