"""Order of layouts as planned, against their order as timed, on CPU ranks of this machine.

    python benchmarks/plan_search.py --page benchmarks/results/plan_search.md

The layouts of a debug recipe are sorted by their approximate costs, and some are taken at equal
distances, so that slow ones are among them. Each is planned on hardware that this machine is
calibrated as in the same run, and timed by `torchtitan compare` in turns.
"""

import argparse
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import correlation
from typing import NamedTuple

import torch

from torchtitan.checks import load_job, problems
from torchtitan.config import PlannedWorld
from torchtitan.estimate.hardware import find_hardware
from torchtitan.estimate.hardware.calibrate import calibrate
from torchtitan.estimate.layout_costs import LayoutCosts
from torchtitan.estimate.layouts import Changes, layouts, with_changes
from torchtitan.estimate.plan import plan
from torchtitan.estimate.search import planned_recipe
from torchtitan.job import JobConfig
from torchtitan.tools.plan.plan_search import words
from torchtitan.tools.plan.timing import ROUNDS, STEPS, WARMUP, time_layouts

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "train_configs/debug_model.toml"
RANKS = 4
FLAGS = (
    "--training.global_batch_size=16",
    "--training.seq_len=256",
    "--compile.enable=false",
    "--checkpoint.enable=false",
    "--validation.enable=false",
)
PAGE = """# Layouts as planned and as timed

`{command}` writes this page: {count} of the {all} valid layouts of `debug_model.toml` with {flags}
on {ranks} CPU ranks, planned on this machine as calibrated in the same run, and timed: {rounds}
runs of each in turns, {steps} steps after {warmup}. {machine}, {cores} cores, torch {torch}, load
{load:.1f} at the start, {date}.

Rank correlation (Spearman) of planned and timed seconds: **{ranked:.2f}**. The layout planned as
the fastest is {place} of {count} as timed, and takes {loss:.0%} longer than the fastest.

| layout | planned s | timed s | least | most | place planned | place timed |
|---|---|---|---|---|---|---|
{rows}
"""


class Row(NamedTuple):
    """A layout, its planned seconds a step, and its timed ones."""

    layout: Changes
    planned: float
    timed: float
    least: float
    most: float


def load(*more: str) -> JobConfig:
    """Load the recipe for CPU ranks."""
    exempt = ("model.tokenizer_path",)
    return load_job(RECIPE, (*FLAGS, *more), RANKS, "cpu", exempt=exempt).config


def chosen(job: JobConfig, costs: LayoutCosts, count: int) -> tuple[list[Changes], int]:
    """Return `count` valid layouts from the fastest to the slowest, and the number of all."""
    valid: dict[tuple[object, ...], Changes] = {}
    for layout in layouts(job, RANKS, RANKS):
        found = problems(with_changes(job, layout), PlannedWorld(RANKS, "cpu"))
        if all(each.severity == "note" for each in found):
            valid[tuple(layout.items())] = layout
    ordered = sorted(valid.values(), key=costs.seconds)
    step = (len(ordered) - 1) / (count - 1)
    return [ordered[round(i * step)] for i in range(count)], len(ordered)


def ranks(values: Sequence[float]) -> list[int]:
    """Return the place of each value, from 1."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    places = {number: place for place, number in enumerate(order, 1)}
    return [places[i] for i in range(len(values))]


def main() -> None:
    """Plan and time layouts, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=8, help="number of layouts")
    parser.add_argument("--page", type=Path, help="file for the page")
    arguments = parser.parse_args()
    job, load_before = load(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calibrate(job, RANKS, folder / "hardware.toml")
        hardware = find_hardware(str(folder / "hardware.toml"))
        taken, number = chosen(job, LayoutCosts(job, RANKS, hardware), arguments.count)
        steps = [plan(with_changes(job, each), RANKS, hardware).time for each in taken]
        given = load_job(RECIPE, (), None, "cpu", exempt=("model.tokenizer_path",)).config
        texts = [planned_recipe(with_changes(job, each), given, str(RECIPE)) for each in taken]
        runs = time_layouts(folder / "runs", texts, RANKS)
    rows = []
    for layout, step, run in zip(taken, steps, runs, strict=True):
        assert step is not None, "the hardware is known"
        timed = run["seconds_per_step"]
        rows.append(Row(layout, step.seconds, timed["value"], timed["low"], timed["high"]))
    rows.sort(key=lambda row: row.planned)
    places = ranks([row.planned for row in rows]), ranks([row.timed for row in rows])
    page = PAGE.format(
        command=shlex.join(["python", "benchmarks/plan_search.py", *sys.argv[1:]]),
        count=len(rows),
        all=number,
        flags=", ".join(f"`{flag}`" for flag in FLAGS[:3]),
        ranks=RANKS,
        rounds=ROUNDS,
        steps=STEPS,
        warmup=WARMUP,
        machine=platform.machine(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        load=load_before,
        date=time.strftime("%Y-%m-%d"),
        ranked=correlation(*places),
        place=places[1][0],
        loss=rows[0].timed / min(row.timed for row in rows) - 1,
        rows="\n".join(
            f"| {words(row.layout)} | {row.planned:.3f} | {row.timed:.3f} | {row.least:.3f} "
            f"| {row.most:.3f} | {one} | {other} |"
            for row, one, other in zip(rows, *places, strict=True)
        ),
    )
    print(page)
    if arguments.page:
        arguments.page.write_text(page)


if __name__ == "__main__":
    main()
