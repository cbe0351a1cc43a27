"""Time of a mixture of experts by way of computing products, beside a dense feed-forward.

    python benchmarks/experts.py --output benchmarks/results/experts.md --docs docs/experts.md

Forward and backward in float32 on one core. In each round all take turns, and ratios are of one
round. On a GPU `scripts/gpu --stage fast --only experts` measures layers of full size.
"""

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import torch
from quoted import quote

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.gpu.mixture import Layer, timed  # noqa: E402
from torchtitan.device import pick  # noqa: E402
from torchtitan.models.experts import Products, Routing  # noqa: E402

DIM, EXPERT_DIM, TOP_K = 256, 128, 4
EXPERTS, TOKENS = (8, 32, 128), (256, 1024, 4096)
PARTS = ("routing", "dispatch", "combine", "one grouped product")

PAGE = """\
# Mixtures of experts: ways to compute products

<!-- Written by benchmarks/experts.py. -->

`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}. {load:.1f} processes
wanted to run at the end.

Forward and backward of a layer in float32 on one core: dim {dim}, experts of width {expert_dim}, of
which a token has {top_k}. Times are relative to a feed-forward of width {width}, which has equal
FLOPs, in the same round: median (quartiles) of {rounds} rounds in which all take turns. Weights are
random, so that the load is nearly uniform.

{ways}

What surrounds the products, forward and backward: the router with its choice, the sort and copy of
tokens to experts, and the weighted sum of results. The last column is one of the three products.

{parts}
"""


def table(heads: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    heads = tuple(heads)
    lines = [heads, ("---:",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def row(experts: int, tokens: int, ways: dict[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """Return the cells of a layer."""
    cells = []
    for name in names:
        low, middle, high = ways[name]["ratio"]
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    milliseconds = f"{ways['feed-forward']['ms'][1]:.1f}"
    return (f"{experts}", f"{tokens:,}", f"{tokens * TOP_K // experts:,}", milliseconds, *cells)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--docs", type=Path, help="page with a place for the table of ways")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = pick()
    found = {}
    for experts in EXPERTS:
        for tokens in TOKENS:
            layer = Layer(DIM, experts, EXPERT_DIM, Routing(top_k=TOP_K), tokens=tokens)
            found[experts, tokens] = timed(layer, device, torch.float32, arguments.rounds)["ways"]
            print(f"{experts} experts, {tokens} tokens: done", file=sys.stderr)
    heads = ("experts", "tokens", "rows of an expert", "feed-forward, ms")
    tables = [
        table([*heads, *names], (row(*key, ways, names) for key, ways in found.items()))
        for names in (get_args(Products), PARTS)
    ]
    page = PAGE.format(
        command=f"python benchmarks/experts.py --rounds {arguments.rounds}",
        device=device.name,
        cores=os.cpu_count(),
        torch=torch.__version__,
        python=platform.python_version(),
        date=datetime.date.today(),
        load=os.getloadavg()[0],
        dim=DIM,
        expert_dim=EXPERT_DIM,
        top_k=TOP_K,
        width=TOP_K * EXPERT_DIM,
        rounds=arguments.rounds,
        ways=tables[0],
        parts=tables[1],
    )
    if arguments.output:
        arguments.output.write_text(page, encoding="utf-8")
    else:
        print(page)
    if arguments.docs:
        quote("experts.py", tables[0], arguments.docs)


if __name__ == "__main__":
    main()
