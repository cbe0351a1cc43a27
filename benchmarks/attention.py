"""What is lost when queries, keys and values are rounded to 8 bits, with and without a rotation.

    python benchmarks/attention.py --output benchmarks/results/attention.md \\
        --docs docs/research/attention_8bit.md

Causal attention of 4 heads of 64 over 256 tokens, of normal numbers, in float32. In one half of the
rows two channels of each head are as many times larger. The error is that of what comes out,
relative to attention without rounding: as a root of summed squares over all channels, and over
those alone that do not stand out. Median of the seeds. The numbers do not depend on the machine.
"""

import argparse
import datetime
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from quoted import quote

from torchtitan.models.attention import SelfAttention
from torchtitan.research.hadamard_attention.low_precision_attention import (
    LowPrecisionAttention,
    RoundedAttention,
)

ROOT = Path(__file__).resolve().parent.parent
ROTATIONS = ("none", "qk", "v", "qkv")
HEAD, LOUD = 64, 2


def errors(config: LowPrecisionAttention, times: float, seed: int) -> tuple[float, float]:
    """Of all channels, and of those that do not stand out."""
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(1, 4, 256, HEAD, generator=generator) for _ in range(3)]
    for x in given:
        x[..., :LOUD] *= times
    expected = SelfAttention()(*given, None)
    off = RoundedAttention(config, [])(*given, None) - expected

    def relative(channels: slice) -> float:
        return float(off[..., channels].norm() / expected[..., channels].norm())

    return relative(slice(None)), relative(slice(LOUD, None))


def cell(seeds: int, times: float, **settings: Any) -> str:
    """Both errors, in percent."""
    config = LowPrecisionAttention.model_validate(settings)
    found = zip(*(errors(config, times, seed) for seed in range(seeds)), strict=True)
    return " / ".join(f"{100 * statistics.median(each):.1f}" for each in found)


def table(seeds: int) -> str:
    """A row for each format, size of the channels that stand out, and kind of scale."""
    lines = [
        "| rounded to | two channels | a scale for each | "
        + " | ".join(f"`{rotation}`" for rotation in ROTATIONS)
        + " |",
        "|---|---|---|" + "---|" * len(ROTATIONS),
    ]
    for dtype in ("float8", "int8"):
        for times in (1, 10):
            for scale in ("token", "head", "tensor"):
                cells = [
                    cell(seeds, times, dtype=dtype, scale=scale, rotation=rotation)
                    for rotation in ROTATIONS
                ]
                stand = "like the others" if times == 1 else f"{times} times larger"
                lines.append(f"| {dtype} | {stand} | {scale} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/attention.md")
    parser.add_argument("--docs", type=Path, help="a page that quotes the table")
    arguments = parser.parse_args()
    found = table(arguments.seeds)
    command = " ".join(("python", "benchmarks/attention.py", *sys.argv[1:]))
    arguments.output.write_text(
        "# Attention in 8 bits\n\n"
        f"`{command}`: {os.cpu_count()} cores, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {datetime.date.today()}\n\n"
        "Relative error of the output in percent, over all channels / over those that do not stand "
        "out; columns are what a Hadamard transform rotates first. How: `benchmarks/attention.py`."
        f"\n\n{found}\n"
    )
    if arguments.docs:
        quote("attention.py", found, arguments.docs)


if __name__ == "__main__":
    main()
