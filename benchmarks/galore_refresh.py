"""Time in which GaLore finds the basis of a gradient, next to functions of torch.

    python benchmarks/galore_refresh.py --output benchmarks/results/galore_refresh.md

All have as many power iterations and additional columns. The energy of a basis is the part of the
gradient's squares that its projection has.
"""

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.device import Device
from torchtitan.optim.parameters import NamedParameter
from torchtitan.research.galore.low_rank import Method, Projection, find_bases

ITERATIONS, OVERSAMPLING = 2, 8
THEIRS = "torch.svd_lowrank, float32"
SHAPES = ((1024, 1024, 256), (2048, 2048, 512), (4096, 4096, 1024))
"""Rows, columns and rank."""
SLOW = ("exact, float64", "torch.linalg.svd, float32")
"""Methods that are left out where the matrix has more than 2,048 rows."""


class Refresh(NamedTuple):
    """Measurement of a method."""

    seconds: list[float]
    energy: float
    """Part of the squares of the gradient that its projection has."""


def decaying(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return a gradient (rows, columns), float32: noise, and directions that decay slowly."""
    torch.manual_seed(0)
    least = min(rows, columns)
    left, right = torch.randn(rows, least), torch.randn(least, columns)
    scales = torch.arange(1, least + 1) ** -0.7
    return ((left * scales) @ right).to(device)


def methods(rank: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return functions from a gradient (rows, columns) to a basis (columns, rank)."""
    columns = rank + OVERSAMPLING

    def ours(method: Method) -> Callable[[Tensor], Tensor]:
        def find(gradient: Tensor) -> Tensor:
            parameter = torch.nn.Parameter(torch.empty_like(gradient))
            parameter.grad = gradient
            named = NamedParameter(parameter, "weight", "matrix")
            (basis,) = find_bases([Projection(named, rank, 1)], ["0"], method)
            return basis

        return find

    def randomized(dtype: torch.dtype) -> Method:
        return Method(False, ITERATIONS, OVERSAMPLING, dtype)

    def theirs(gradient: Tensor) -> Tensor:
        return torch.svd_lowrank(gradient, q=columns, niter=ITERATIONS)[2][:, :rank]

    return {
        "randomized, float32": ours(randomized(torch.float32)),
        THEIRS: theirs,
        "randomized, float64": ours(randomized(torch.float64)),
        "torch.svd_lowrank, float64": lambda x: theirs(x.double()).to(x.dtype),
        "exact, float64": ours(Method(exact=True)),
        "torch.linalg.svd, float32": lambda x: torch.linalg.svd(x, full_matrices=False)[2][:rank].T,
    }


def refresh_times(
    rows: int, columns: int, rank: int, device: Device, rounds: int, without: Sequence[str] = ()
) -> dict[str, Refresh]:
    """Measure each method, in turns; `without` names some that are left out."""
    gradient = decaying(rows, columns, device.torch_device)
    found: dict[str, Refresh] = {}
    for number in range(rounds + 1):
        for name, find in methods(rank).items():
            if name in without:
                continue
            begin = device.stamp()
            basis = find(gradient)
            seconds = device.seconds(begin, device.stamp())
            if number == 0:  # warms up
                energy = (gradient @ basis).square().sum() / gradient.square().sum()
                found[name] = Refresh([], energy.item())
            else:
                found[name].seconds.append(seconds)
    return found


PAGE = """\
# Time of a refresh of GaLore's bases

Made by `{command}` on {machine} with one thread, torch {torch}, Python
{python}, {date}; load {load}.

Seconds, the median of {rounds} rounds in which all methods take turns (lowest to highest), with
{iterations} power iterations and {oversampling} additional columns. The gradient has singular
values that decay slowly. The last column is the part of its squares that its projection has.

| matrix, rank | method | seconds | relative to torch.svd_lowrank in float32, by round | energy |
|---|---|---:|---:|---:|
{rows}
"""


def page(found: dict[tuple[int, int, int], dict[str, Refresh]], command: str, rounds: int) -> str:
    lines = []
    for (m, n, rank), by_method in found.items():
        theirs = by_method[THEIRS].seconds
        for name, (seconds, energy) in by_method.items():
            ratios = [own / other for own, other in zip(seconds, theirs, strict=True)]
            cells = [f"{m:,} x {n:,}, {rank:,}", name, spread(seconds), spread(ratios)]
            lines.append(f"| {' | '.join(cells)} | {energy:.4f} |")
    return PAGE.format(
        command=command,
        machine=platform.machine(),
        torch=torch.__version__,
        python=platform.python_version(),
        date=date.today().isoformat(),
        load=f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores",
        rounds=rounds,
        iterations=ITERATIONS,
        oversampling=OVERSAMPLING,
        rows="\n".join(lines),
    )


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="page to write")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=4096, help="rows of the largest matrix")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        shape: refresh_times(
            *shape, Device("cpu"), arguments.rounds, without=SLOW if shape[0] > 2048 else ()
        )
        for shape in SHAPES
        if shape[0] <= arguments.largest
    }
    command = " ".join(["python", "benchmarks/galore_refresh.py", *sys.argv[1:]])
    text = page(found, command, arguments.rounds)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
