"""Seconds that a plan takes, by model, layers and number of ranks.

    python benchmarks/plan_seconds.py --page benchmarks/results/plan_seconds.md

Each plan is made in a process of its own, whose imports are not counted. Processor time is given
besides, since other work on the machine does not lengthen it as much.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from torchtitan.checks import load_job
from torchtitan.config import CannotRun
from torchtitan.estimate.changes import changes
from torchtitan.estimate.hardware import find_hardware
from torchtitan.estimate.plan import plan
from torchtitan.job import JobConfig

RECIPES = Path(__file__).parents[1] / "train_configs"
CASES = {
    "llama3_8b": (8, 64, 1024),
    "llama3_70b": (256, 4096),
    "llama3_405b": (512, 4096, 16384),
}
SMALL_GIB = 50
"""Memory of a device in which the largest recipe does not fit, and with changes does."""


def load(recipe: str, ranks: int, *flags: str) -> JobConfig:
    """Load a recipe, without the files that a user brings."""
    try:
        return load_job(RECIPES / f"{recipe}.toml", flags, ranks, "cuda").config
    except CannotRun as error:
        return error.config


def measure(recipe: str, ranks: int, is_changed: bool) -> dict[str, float]:
    """Plan a recipe in this process."""
    job, hardware = load(recipe, ranks), find_hardware("h100")
    wall, processor = time.perf_counter(), time.process_time()
    capacity = SMALL_GIB if is_changed else None
    planned = plan(job, ranks, hardware, capacity_gib=capacity)
    if is_changed:
        changes(lambda size, flags: load(recipe, size, *flags), planned)
    return {
        "wall": time.perf_counter() - wall,
        "processor": time.process_time() - processor,
        "layers": job.model_args().n_layers,
        "recorded": len(planned.kinds),
    }


def main() -> None:
    """Measure all cases, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        recipe, ranks, is_changed = options.one
        print(json.dumps(measure(recipe, int(ranks), is_changed == "True")))
        return
    rows = [(recipe, ranks, False) for recipe, sizes in CASES.items() for ranks in sizes]
    rows.append(("llama3_405b", 512, True))
    lines = [
        "# Seconds that a plan takes",
        "",
        "`python benchmarks/plan_seconds.py --page benchmarks/results/plan_seconds.md` writes this "
        "page. Imports, which take about two seconds, are not included. Other work on the machine "
        "lengthens the seconds several times, the processor seconds hardly.",
        "",
        f"{platform.machine()}, torch {torch.__version__}, one thread, hardware `h100`.",
        "",
        "| recipe | layers | ranks | recorded ranks | seconds | processor seconds |",
        "|---|---|---|---|---|---|",
    ]
    for recipe, ranks, is_changed in rows:
        words = [sys.executable, __file__, "--one", recipe, str(ranks), str(is_changed)]
        found = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
        kind = f" in {SMALL_GIB} GiB, with changes" if is_changed else ""
        lines.append(
            f"| {recipe}{kind} | {found['layers']} | {ranks:,} | {found['recorded']} "
            f"| {found['wall']:.1f} | {found['processor']:.1f} |"
        )
        print(lines[-1], flush=True)
    if options.page:
        options.page.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
