"""What each strategy of FSDP holds by plan and sends by formula for each size of ViT-MAE.

    python benchmarks/strategies.py --output benchmarks/results/vit_mae_sizes.md

The variants of the study `train_configs/studies/vit_mae_3b.toml`, for every size that
https://arxiv.org/abs/2404.11706 publishes, on 64 devices of the kind that its cluster has.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from torchtitan.device import GIB
from torchtitan.estimate.plan import plan
from torchtitan.tools.compare.gather import formulas
from torchtitan.tools.compare.prepare import prepare
from torchtitan.tools.compare.study import read_study

ROOT = Path(__file__).resolve().parent.parent
STUDY = ROOT / "train_configs/studies/vit_mae_3b.toml"
SIZES = ("base", "huge", "1B", "3B", "5B", "15B")
DEVICE = 64e9
"""Bytes of a die of an MI250X."""


class Foreseen(NamedTuple):
    """Of a rank, in bytes."""

    held: float
    """What torch's allocator reserves on the fullest rank, by its plan."""
    in_group: float
    """What it sends to those that it shares parameters with."""
    between: float
    """What it sends to those that have the same part."""


def foresee(size: str) -> dict[str, Foreseen]:
    """What each variant of the study needs with a model of this size."""
    os.environ.setdefault("HEAD_NODE", "node1")
    with tempfile.TemporaryDirectory() as images:
        Image.new("RGB", (8, 8)).save(Path(images) / "one.png")  # the recipe wants to find some
        flags = ["--model.flavor", size, "--data.dataset_path", images]
        found = {}
        for ready in prepare(read_study(STUDY, flags)):
            assert not ready.problems, ready.problems
            held = plan(ready.job, ready.plan.ranks).reserved_gib.value * GIB
            sent = formulas(ready.job, ready.plan.ranks)
            assert sent is not None
            parts = [
                sum(count for (kind, _), (_, count) in sent.items() if kind == axis)
                for axis in ("dp_shard", "dp_replicate")
            ]
            assert sum(parts) == sum(count for _, count in sent.values())
            if "prefetch" not in ready.name:  # how much is ahead when is in no formula
                found[ready.name] = Foreseen(held, *parts)
    return found


PAGE = """\
# ViT-MAE on 64 devices, by plan and by formula

Made by `{command}`.

What torch's allocator reserves on a rank by plan, and what rank 0 sends in a step by formula, in
each variant of `train_configs/studies/vit_mae_3b.toml`: 32 images a device, every block recomputed,
AdamW in float32, products in bfloat16. Nothing was run. A device of Frontier has 64 GB, 59.6 GiB;
what does not fit is marked.

**GiB of a rank**

{held}

**GB that a rank sends in a step**: within its group, and between groups

{sent}
"""


def table(found: dict[str, dict[str, Foreseen]], show: Callable[[Foreseen], str]) -> str:
    lines = [f"| | {' | '.join(found)} |", "|---|" + "---|" * len(found)]
    for name in found[SIZES[0]]:
        cells = [show(of_size[name]) for of_size in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gib(each: Foreseen) -> str:
    return f"{each.held / GIB:.1f}" + (" too much" if each.held > DEVICE else "")


def page(command: str) -> str:
    found = {size: foresee(size) for size in SIZES}
    sent = table(found, lambda each: f"{each.in_group / 1e9:.1f} + {each.between / 1e9:.1f}")
    return PAGE.format(command=command, held=table(found, gib), sent=sent)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="Write the page here, not to the terminal.")
    chosen = parser.parse_args()
    text = page(f"python {' '.join(sys.argv)}")
    if chosen.output:
        chosen.output.write_text(text)
    else:
        print(text)
