"""What each precision learns, beside what the seed alone changes.

    python benchmarks/learning.py --output benchmarks/results/learning.md

Trains the debug recipe for 200 steps on one CPU: in bfloat16 from five seeds, and then, each from
the first of them, in every precision that a recipe can ask for. A precision changes nothing that
matters if its loss ends no farther from bfloat16's than a seed does. So that this can fail, three
runs are harmed on purpose, and have to be told apart.

The loss of a run is the mean of its last 20 steps. A gap is that of a run minus that of bfloat16
from the same start; the spread is the standard deviation over the five seeds.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "train_configs/debug_model.toml"
SEEDS = range(5)
STEPS, LAST = 200, 20
BOUND = 1.0
"""Spreads that a gap may have."""

SHORT = (
    *("training.mixed_precision_param=bfloat16", "training.local_batch_size=4"),
    *("training.seq_len=128", "lr_scheduler.warmup_steps=20", "metrics.log_freq=1"),
    *("data.report_unigram_loss=false", "validation.enable=false", "checkpoint.enable=false"),
)
"""Keys that all runs share."""


def converted(name: str, *keys: str) -> tuple[str, ...]:
    keys = (f"name={name}", "emulate=true", *keys)
    return tuple(f"convert.0.{key}" for key in keys)


PRECISIONS: dict[str, tuple[str, ...]] = {
    "Float8 tensorwise": converted("float8", "recipe=tensorwise"),
    "Float8 rowwise": converted("float8", "recipe=rowwise"),
    "Float8 rowwise_with_gw_hp": converted("float8", "recipe=rowwise_with_gw_hp"),
    "MXFP8": converted("mxfp8"),
    "AdamW states in bfloat16": ("optimizer.state_dtype=bfloat16",),
    "AdamW states in Float8": ("optimizer.state_dtype=float8",),
    "AdamW states in 8 bits": ("optimizer.state_dtype=8bit",),
    "AdamW states in 4 bits": ("optimizer.state_dtype=4bit",),
}
HARMED: dict[str, tuple[str, ...]] = {
    "learning rate halved": ("optimizer.lr=1.5e-3",),
    "beta2 0.5": ("optimizer.beta2=0.5",),
    "gradients clipped to 0.01": ("training.max_norm=0.01", "optimizer.eps=1e-4"),
}


@dataclass(frozen=True)
class Learned:
    """The loss of each step, by name of run."""

    seeds: list[list[float]]
    """In bfloat16; the first is what the others are compared with."""
    runs: Mapping[str, list[float]]

    @property
    def spread(self) -> float:
        return statistics.stdev(map(end, self.seeds))

    def gap(self, name: str) -> float:
        """Nats."""
        return end(self.runs[name]) - end(self.seeds[0])

    def is_same(self, name: str) -> bool:
        return abs(self.gap(name)) <= BOUND * self.spread


def end(losses: list[float]) -> float:
    return statistics.fmean(losses[-LAST:])


def train(keys: Iterable[str], folder: Path, steps: int) -> list[float]:
    """The loss of each step of the debug recipe with these keys."""
    flags = [f"--{key}" for key in (*SHORT, *keys)]
    flags += [f"--training.steps={steps}", f"--job.dump_folder={folder}"]
    command = [sys.executable, "-m", "torchtitan.train", str(RECIPE), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def measure(steps: int = STEPS, workers: int = 2) -> Learned:
    """Train all runs, `workers` at a time."""
    jobs = {f"seed {seed}": (f"debug.seed={seed}",) for seed in SEEDS} | PRECISIONS | HARMED
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(workers) as pool:
        losses = {}
        waiting = {
            name: pool.submit(train, keys, Path(place) / str(number), steps)
            for number, (name, keys) in enumerate(jobs.items())
        }
        for name, future in waiting.items():
            losses[name] = future.result()
            print(f"{name}: {end(losses[name]):.4f}", file=sys.stderr, flush=True)
    seeds = [losses.pop(f"seed {seed}") for seed in SEEDS]
    return Learned(seeds, losses)


PAGE = """\
# What each precision learns

Made by `{command}` on {machine} with torch {torch}, torchao {torchao}, Python {python}, {date}.

The debug model, {steps} steps of 512 tokens, in bfloat16 and then with one thing changed, from the
same start. *Loss* is the mean of the last {last} steps; *gap* its distance to bfloat16's, and *in
spreads* the same in units of the standard deviation over five seeds in bfloat16, {spread:.4f}. A
precision passes with at most {bound:g}. The last three rows are harmed on purpose: they must not.

| run | loss | gap | in spreads | the same |
|---|---|---|---|---|
{rows}

![Gaps](learning.svg)
"""


def page(learned: Learned, command: str) -> str:
    import torchao

    seeds = [
        f"| bfloat16, seed {number} | {end(losses):.4f} | | | |"
        for number, losses in enumerate(learned.seeds)
    ]
    others = [
        f"| {name} | {end(learned.runs[name]):.4f} | {learned.gap(name):+.4f} | "
        f"{learned.gap(name) / learned.spread:+.2f} | {'yes' if learned.is_same(name) else 'no'} |"
        for name in (*PRECISIONS, *HARMED)
    ]
    return PAGE.format(
        command=command,
        machine=f"{os.cpu_count()} cores, {platform.machine()}",
        torch=torch.__version__,
        torchao=torchao.__version__,
        python=platform.python_version(),
        date=__import__("datetime").date.today().isoformat(),
        steps=len(learned.seeds[0]),
        last=LAST,
        bound=BOUND,
        spread=learned.spread,
        rows="\n".join((*seeds, *others)),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="Write the page here, not to the terminal.")
    parser.add_argument("--steps", type=int, default=STEPS)
    chosen = parser.parse_args()
    text = page(measure(chosen.steps), f"python {' '.join(sys.argv)}")
    if chosen.output:
        chosen.output.write_text(text)
    else:
        print(text)
