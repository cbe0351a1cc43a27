"""Time of a kernel on a device: its launch, then its arithmetic or its memory, if that is slower.

Rates of arithmetic are those that the hardware's file has for products and for attention, carried
over to other shapes by known properties of such kernels:

- A product is cut into tiles, which the multiprocessors compute in waves, so the last wave and the
  edges cost as much as full ones (NVIDIA, "Matrix Multiplication Background User's Guide").
- Smaller tiles reuse less data, and a short inner dimension leaves the start and the
  end of each tile without arithmetic.
- Attention computes half of the pairs if it is causal, and loses time at the diagonal, the more the
  shorter the sequence.

All other kernels take the time of the bytes that they read and write.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Final

from torchtitan.plan.hardware import Hardware, dtype_name
from torchtitan.plan.recording import Kernel

TILES: Final = {
    (256, 128): 1.0,
    (128, 256): 1.0,
    (128, 128): 0.95,
    (128, 64): 0.8,
    (64, 128): 0.8,
    (64, 64): 0.6,
}
"""Tiles of products, and their rates relative to the largest."""
SPLITS: Final = (1, 2, 4, 8)
"""Parts of the inner dimension that are computed at the same time."""
SHORTEST_PART: Final = 1024
IN_A_STEP: Final = 0.936
"""Rate of products in a step, relative to products alone, since a device that is busy throughout
is at the limit of its power: those of the output layer of benchmarks/results/gpu_h100.md (8 layers,
2 sequences, Float8) take 18.8 % of a step, 732 TFLOP/s, where products alone reach 782."""
ROWWISE: Final = 0.75
"""Rate of Float8 products with a scale for each row, relative to one for each tensor: the steps of
benchmarks/results/gpu_h100.md (8 layers, 2 sequences) take 44 ms more for 131 ms of products."""
START_OF_TILE: Final = 128
"""Elements of the inner dimension that a tile could compute while it starts and ends."""
DIAGONAL: Final = 700
"""Tokens that causal attention loses: FlashAttention-3 (arXiv:2407.08608, figure 5) reaches 280,
380, 490, 560, 600 and 640 TFLOP/s with 512 to 16,384 tokens."""
MEASURED_LENGTH: Final = 8192
"""Tokens of the sequences of the rates in hardware files."""
LISTS: Final = 0.92
"""Bandwidth of kernels over lists of tensors, relative to a copy: AdamW, the norm and clipping move
40 bytes a parameter, at 2,570 GB/s in the traces of benchmarks/results/gpu_h100.md."""
CHUNK_CAT: Final = 0.6
"""Bandwidth of the kernel that casts gradients for a reduce-scatter, relative to a copy; on H100
278 billion elements a second from bfloat16 to float32 (pytorch/pytorch, pull request 120678)."""
CASTS: Final = 0.45
"""Bandwidth of fused loops that read or write Float8, relative to a copy: of the three rows "Float8
tensorwise" of benchmarks/results/gpu_h100.md, whose steps else take 7 to 17 % longer than planned.
They write the transposed operands of the backward element by element."""
OVERWRITING: Final = ("copy_", "fill_", "zero_", "split_with_sizes_copy", "chunk_cat")
"""Ends of names of operators that write some of their inputs without reading them."""
LOOKUPS: Final = ("aten.embedding", "aten.index", "aten.gather", "aten.index_select")
"""Operators that read of their first input only what they write."""


def kernel_seconds(kernel: Kernel, hardware: Hardware) -> float:
    """Return the seconds that a kernel takes on the device."""
    read = kernel.read
    if kernel.name.endswith(OVERWRITING):
        read = max(read - kernel.written, 0)
    elif kernel.name in LOOKUPS:
        read = min(read, kernel.written)
    bandwidth = hardware.memory_bandwidth * 1e9
    if "_foreach_" in kernel.name or "_fused_adam" in kernel.name:
        bandwidth *= LISTS
    elif kernel.name.endswith("chunk_cat") and kernel.written > read:
        bandwidth *= CHUNK_CAT
    elif kernel.name == "inductor.fused" and kernel.dtype.itemsize == 1:
        bandwidth *= CASTS
    written = kernel.written
    if "_fused_adam" in kernel.name:  # the schema has gradients, which only a scaler changes
        written = written * 3 // 4
    memory = (read + written) / bandwidth
    return hardware.launch_us * 1e-6 + max(memory, _arithmetic_seconds(kernel, hardware))


def _arithmetic_seconds(kernel: Kernel, hardware: Hardware) -> float:
    if "attention" in kernel.name:
        return _attention_seconds(kernel, hardware)
    shapes, name = kernel.shapes, dtype_name(kernel.dtype)
    if not kernel.flops:
        return 0.0
    if kernel.name in ("torchtitan.expert_products", "torchtitan.expert_gradients"):
        (rows, width), other, (count,) = shapes[:3]
        each = max(rows // count, 1)  # as if all experts had as many rows
        m, k = (each, width) if len(other) == 3 else (width, each)
        return kernel.flops / product_rate(name, m, other[1], k, count, hardware)
    if "addmm" in kernel.name or "baddbmm" in kernel.name:
        shapes = shapes[1:]
    if "mm" in kernel.name and len(shapes) > 1:
        (*batch, m, k), n = shapes[0], shapes[1][-1]
    else:
        batch, m, n, k = [], 8192, 8192, 8192  # a convolution
    rate = product_rate(name, m, n, k, math.prod(batch), hardware)
    if "scaled_mm" in kernel.name and len(shapes) > 2 and math.prod(shapes[2]) == m:
        rate *= ROWWISE
    return kernel.flops / rate


def _attention_seconds(kernel: Kernel, hardware: Hardware) -> float:
    """Return the seconds of the arithmetic of fused attention."""
    is_backward = kernel.name.endswith("backward")
    queries, keys = kernel.shapes[1:3] if is_backward else kernel.shapes[:2]
    flops = kernel.flops or 4 * math.prod(queries) * keys[-2] * (2.5 if is_backward else 1.0)
    rates = {rate.head_dim: rate for rate in hardware.attention}
    if rates:
        found = rates[min(rates, key=lambda size: abs(math.log(size / queries[-1])))]
        rate = (found.backward if is_backward else found.forward) * 1e12
    else:
        rate = 0.6 * _largest_rate(dtype_name(kernel.dtype), hardware)
    if kernel.is_causal:
        flops /= 2
        rate *= attention_share(keys[-2])
    if dtype_name(kernel.dtype) == "float32":
        shares = [_largest_rate(name, hardware) for name in ("float32", "bfloat16")]
        rate *= min(shares[0] / shares[1], 1.0)
    return flops / rate


def attention_share(tokens: int) -> float:
    """Return the rate of causal attention relative to sequences of `MEASURED_LENGTH`."""
    return tokens / (tokens + DIAGONAL) * (1 + DIAGONAL / MEASURED_LENGTH)


def product_rate(name: str, m: int, n: int, k: int, batch: int, hardware: Hardware) -> float:
    """Return the FLOP/s of `batch` products of (m, k) and (k, n) matrices."""
    if not getattr(hardware.peaks, name):
        name = "bfloat16" if hardware.peaks.bfloat16 else "float32"
    processors = hardware.multiprocessors
    share = _used(m, n, k, batch, processors)
    measured = [rate for rate in hardware.products if rate.dtype == name]
    if not measured:
        return _largest_rate(name, hardware) * share * IN_A_STEP

    def distance(rate: tuple[int, ...]) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(rate, (m, n, k), strict=True))

    near = min(measured, key=lambda rate: distance((rate.m, rate.n, rate.k)))
    there = _used(near.m, near.n, near.k, 1, processors)
    peak = getattr(hardware.peaks, name)
    return float(min(near.tflops * share / there, peak)) * IN_A_STEP * 1e12


def _largest_rate(name: str, hardware: Hardware) -> float:
    """Return the FLOP/s of large products; of a dtype without measurements, from its peak."""
    peaks = hardware.peaks
    peak = getattr(peaks, name) or peaks.bfloat16 or peaks.float32
    assert peak, "the file of a hardware was checked"
    shares = [rate.tflops / getattr(peaks, rate.dtype) for rate in hardware.products]
    own = [rate.tflops for rate in hardware.products if rate.dtype == name]
    return max(own, default=peak * min(shares, default=0.8)) * 1e12


@cache
def _used(m: int, n: int, k: int, batch: int, processors: int) -> float:
    """Return the share of the arithmetic units' time that a product uses, for its best tiles."""
    return max(
        _used_by(tile, m, n, k, batch, processors, split) * rate
        for tile, rate in TILES.items()
        for split in SPLITS
        if split == 1 or k >= split * SHORTEST_PART
    )


def _used_by(
    tile: Sequence[int], m: int, n: int, k: int, batch: int, processors: int, split: int
) -> float:
    rows, columns = math.ceil(m / tile[0]), math.ceil(n / tile[1])
    tiles = rows * columns * batch * split
    waves = math.ceil(tiles / processors)
    part = k / split
    filled = m * n / (rows * tile[0] * columns * tile[1])
    return filled * tiles / (waves * processors) * part / (part + START_OF_TILE)
