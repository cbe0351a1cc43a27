"""Hardware by name, or from a file of one's own: what a device computes, holds and sends.

Each file has the peaks of a data sheet and the rates that large products, attention and streaming
kernels reach, which are lower, each with its source in a comment. Bandwidths are decimal, in GB/s;
memory is in GiB, as torch reports it.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import tomli
import torch
from pydantic import AfterValidator, create_model
from pydantic.fields import FieldInfo

from torchtitan.config import (
    Config,
    Context,
    Gathered,
    Problem,
    RecipeError,
    descriptions,
    load,
    local_path,
    nearest,
    read_file,
    show,
)

FOLDER: Final = Path(__file__).parent
UNIT_STEPS: Final = (1.0, 1e3, 1e-3, 1e6, 1e-6, 1e9, 1e-9, 1e12, 1e-12)


def _between(low: float, high: float, unit: str) -> AfterValidator:
    """Return a validator of the values of a unit, which recognizes those of another."""

    def check(value: float) -> float:
        if low <= value <= high:
            return value
        scaled = (abs(value) * step for step in UNIT_STEPS)
        meant = next((number for number in scaled if low <= number <= high), None)
        hint = f"; did you mean {meant:g}?" if meant else ""
        raise ValueError(f"wanted {low:g} to {high:g} {unit}{hint}".replace("  ", " "))

    return AfterValidator(check)


LEAST_TFLOPS = 0.0001
Teraflops = Annotated[float, _between(LEAST_TFLOPS, 100_000, "TFLOP/s")]
Bandwidth = Annotated[float, _between(0.001, 50_000, "GB/s")]
Microseconds = Annotated[float, _between(0.01, 100_000, "microseconds")]
Size = Annotated[int, _between(1, 2**24, "elements")]
ProductDtype = Literal["float32", "tfloat32", "bfloat16", "float8", "mxfp8"]


class Peaks(Config):
    """Dense peaks (without sparsity) of matrix products in TFLOP/s, by dtype."""

    float32: Teraflops | None = None
    """Float32 without TF32."""
    tfloat32: Teraflops | None = None
    """Float32 with TF32."""
    bfloat16: Teraflops | None = None
    """Bfloat16 and float16."""
    float8: Teraflops | None = None
    """Float8."""
    mxfp8: Teraflops | None = None
    """Float8 with a scale per block of 32."""


class ProductRate(Config):
    """Measured rate of the product of an (m, k) and a (k, n) matrix."""

    dtype: ProductDtype
    """Dtype of both matrices."""
    m: Size
    """Rows of the first matrix."""
    n: Size
    """Columns of the second matrix."""
    k: Size
    """Columns of the first matrix."""
    tflops: Teraflops
    """Rate in TFLOP/s."""


class AttentionRate(Config):
    """Measured rate of fused causal attention on a long sequence, where the mask saves half."""

    head_dim: Size
    """Size of a head."""
    forward: Teraflops
    """Rate of the forward in TFLOP/s."""
    backward: Teraflops
    """Rate of the backward in TFLOP/s."""


class Link(Config):
    """Link of a rank to others."""

    bandwidth: Bandwidth
    """GB/s that a rank sends, while it receives as much, in large collectives."""
    latency: Microseconds
    """Time of an empty message in microseconds."""


class Hardware(Config):
    """Device, its memory, and its links to others."""

    name: str
    """Name of the hardware."""
    description: str
    """Device, nodes and links in words."""
    source: str
    """Origin of the numbers."""
    device: str = ""
    """Name of the device as torch reports it."""
    device_type: Literal["cpu", "cuda"] = "cuda"
    """Type of the device in torch."""
    memory_gib: Annotated[float, _between(0.1, 8192, "GiB")]
    """Memory of a device in GiB."""
    memory_bandwidth: Bandwidth
    """GB/s that a streaming kernel reads and writes in total."""
    multiprocessors: Annotated[int, _between(1, 4096, "")]
    """Number of streaming multiprocessors, compute units or cores."""
    peaks: Peaks
    """Dense peaks by dtype."""
    products: tuple[ProductRate, ...] = ()
    """Measured products."""
    attention: tuple[AttentionRate, ...] = ()
    """Measured attention by head."""
    ranks_per_node: Annotated[int, _between(1, 1024, "ranks")]
    """Devices that the link `node` joins."""
    node: Link
    """Link within a node."""
    network: Link
    """Link between nodes."""
    launch_us: Microseconds
    """Time of an empty kernel on the device in microseconds."""
    host_us: Microseconds
    """Time of the host to issue an operator of eager code in microseconds."""
    dispatch_us: Microseconds = 60.0
    """Time of the host to find the operators on this rank of one on a DTensor, in microseconds."""
    cores: Annotated[int, _between(0, 65536, "cores")] = 0
    """Cores of a node that its ranks share on a CPU, each with a thread; 1: all cores, measured
    together; 0: each rank has its own."""
    outside_allocator_gib: Annotated[float, _between(0, 64, "GiB")]
    """Memory of the context, with the kernels of libraries, on each device in GiB."""
    communicator_gib: Annotated[float, _between(0, 16, "GiB")] = 0.6
    """Memory of a communicator of NCCL in GiB."""

    def peak(self, dtype: torch.dtype) -> float | None:
        """Return the dense peak of products of a dtype in FLOP/s; None if it is not known."""
        teraflops: float | None = getattr(self.peaks, dtype_name(dtype))
        return None if teraflops is None else teraflops * 1e12

    def ranks_per_core(self, ranks: int) -> float:
        """Return how many ranks of a run take turns on a core, at least 1."""
        return max(min(ranks, self.ranks_per_node) / self.cores, 1.0) if self.cores else 1.0

    def problems(self, context: Context) -> Iterator[Problem]:
        """Find rates above the peaks, and rates without one."""
        if not (self.peaks.bfloat16 or self.peaks.float32):
            yield Problem("peaks", "set bfloat16, float32 or both in it")
        fastest = max(filter(None, dict(self.peaks).values()), default=0.0)
        if self.memory_bandwidth < fastest / 10:
            message = f"wanted GB/s that feed {fastest:g} TFLOP/s"
            meant = self.memory_bandwidth * 1000
            hint = f"; did you mean {meant:g}?" if meant > fastest / 10 else ""
            yield Problem("memory_bandwidth", message + hint, ("peaks",))
        for number, rate in enumerate(self.products):
            peak, key = getattr(self.peaks, rate.dtype), f"products.{number}"
            if peak is None:
                yield Problem(f"{key}.dtype", f"set peaks.{rate.dtype} too", ("peaks",))
            elif rate.tflops > peak:
                message = f"wanted at most peaks.{rate.dtype}, {peak:g} TFLOP/s"
                yield Problem(f"{key}.tflops", message, ("peaks",))


def dtype_name(dtype: torch.dtype) -> ProductDtype:
    """Return the key of a dtype in `peaks`."""
    if dtype in (torch.bfloat16, torch.float16):
        return "bfloat16"
    return "float8" if dtype.itemsize == 1 else "float32"


def hardware_names() -> list[str]:
    """Return the names of the hardware that comes with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def _packaged(name: str) -> Hardware:
    return read_hardware(FOLDER / f"{name}.toml")


def find_hardware(name_or_path: str, option: str = "--hardware") -> Hardware:
    """Return the hardware of a name, or of a file.

    Raises:
        RecipeError: with every mistake, if there is no such hardware, or its file is wrong.
    """
    names = hardware_names()
    if name_or_path in names:
        return _packaged(name_or_path)
    path = local_path(name_or_path)
    if os.path.isfile(path):  # Path.is_file raises if the name is too long
        return read_hardware(path)
    raise RecipeError([f"{option}: got {show(name_or_path)}; {_allowed(name_or_path)}"])


def _allowed(wrong: str) -> str:
    names = hardware_names()
    near = nearest(local_path(wrong).stem, names)
    return f"wanted a file or a name: {', '.join(names)}{near}"


def problems_of(stated: str) -> Iterator[Problem]:
    """Find what is wrong with the hardware that a recipe states, packaged or in a file."""
    if stated in hardware_names():
        return
    if not os.path.isfile(local_path(stated)):
        yield Problem("hardware", _allowed(stated))
        return
    try:
        find_hardware(stated)
    except RecipeError as error:
        yield from (Problem("hardware", line) for line in error.lines)


def hardware_of(stated: str, device_type: str, device: str) -> Hardware | None:
    """Return the hardware of existing devices; None if it is unknown.

    Args:
        stated: name or file of a recipe, which is used if it can be of these devices.
        device: name of the devices as torch reports it; empty if it is unknown.
    """
    packaged = [_packaged(name) for name in hardware_names()]
    known = [find_hardware(stated, "job.hardware")] if stated else []
    if (
        known
        and known[0].device_type == device_type
        and (not device or known[0].device in ("", device))
    ):
        return known[0]
    return next((each for each in packaged if device and each.device == device), None)


def read_hardware(path: Path) -> Hardware:
    """Return the hardware of a file.

    Raises:
        RecipeError: with every mistake.
    """
    problems: list[str] = []
    settings = read_file(path, problems)
    if problems:
        raise RecipeError(problems)
    for key, info in Hardware.model_fields.items():
        if info.is_required() and (key,) not in settings:
            problems.append(f"{path}: {key} is missing; set it: {descriptions(Hardware)[key]}")
    gathered = Gathered(settings, str(path), [], problems)
    read = load(_with_defaults(), gathered, lambda hardware: hardware.problems(Context())).config
    return Hardware.model_validate(read.model_dump())


@cache
def _with_defaults() -> type[Hardware]:
    """Return settings without required keys, so that all mistakes of a file are found at once."""
    example = tomli.loads((FOLDER / "h100.toml").read_text(encoding="utf-8"))
    fields: dict[str, Any] = {
        key: (info.annotation, FieldInfo.merge_field_infos(info, default=example[key]))
        for key, info in Hardware.model_fields.items()
        if info.is_required()
    }
    return create_model("HardwareFile", __base__=Hardware, **fields)
