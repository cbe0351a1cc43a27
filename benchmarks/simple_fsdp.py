"""SimpleFSDP beside FSDP2 on two ranks: what stands in the graphs, and how long a step takes.

    python benchmarks/simple_fsdp.py --output benchmarks/results/simple_fsdp.md

All sides train the debug model in the same two processes on gloo, a thread each, compiled by
inductor: FSDP2 block by block, SimpleFSDP as one graph. They take turns, a block of steps each, and
the ratio is taken round by round, so that a machine that slows down slows all.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchtitan.build import build
from torchtitan.checks import load_job
from torchtitan.device import Device, pick
from torchtitan.local_ranks import run_ranks
from torchtitan.parallel import open_world
from torchtitan.research.simple_fsdp import bucketing
from torchtitan.research.simple_fsdp.bucketing import Tally
from torchtitan.torch_private.compiler import compiler_counts
from torchtitan.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "train_configs/debug_model.toml"
ONE_GRAPH = (
    "--sharding.name=simple_fsdp",
    "--compile.granularity=model",
    "--sharding.bucketing",
)
SIDES = {
    "FSDP2": (),
    "SimpleFSDP": (*ONE_GRAPH, "none"),
    "SimpleFSDP, merged by size (1 MB)": (
        *(*ONE_GRAPH, "size"),
        *("--sharding.bucket_mb", "1"),
    ),
    "SimpleFSDP, merged by block": (*ONE_GRAPH, "block"),
}


class Measured(NamedTuple):
    """Of a side: what stands in its graphs, and seconds a step in each block."""

    tallies: dict[str, Tally]
    seconds: list[float]


def train(arguments: argparse.Namespace) -> dict[str, Measured]:
    """One of the two ranks."""
    torch.set_num_threads(1)
    sides: dict[str, Trainer] = {}
    measured: dict[str, Measured] = {}
    with ExitStack() as stack:
        for name, words in SIDES.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            settings = f"""--job.dump_folder={folder} --no-checkpoint.enable --no-validation.enable
                --no-data.report_unigram_loss --training.steps=100000 --metrics.log_freq=100000
                --training.seq_len={arguments.seq_len} --training.local_batch_size=4
                --activation_checkpoint.mode=none --compile.enable --compile.components=model"""
            job = load_job(RECIPE, [*settings.split(), *words], 2, "cpu").config
            world = stack.enter_context(open_world(job.degrees(2), job.comm, Device("cpu")))
            compiler_counts()["inductor"].clear()
            run = build(job, world)
            stack.enter_context(closing(run.batches))
            stack.enter_context(run.meter)
            sides[name] = Trainer(run)
            for _ in range(2):
                sides[name].step()
            measured[name] = Measured(bucketing.tallies(), [])
        for block in range(arguments.blocks):
            # Who goes first alternates, so that a trend favours nobody.
            for name in list(sides)[:: 1 if block % 2 else -1]:
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(arguments.steps):
                    sides[name].step()
                dist.barrier()
                measured[name].seconds.append((time.perf_counter() - begin) / arguments.steps)
    return measured


def spread(values: Sequence[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


PAGE = """\
# SimpleFSDP beside FSDP2

<!-- Written by benchmarks/simple_fsdp.py. -->

The collectives in the compiled graphs of the debug model on two ranks, forward and backward
together, and the mean size of each. *Speed* is to FSDP2, round by round, median (quartiles) of
{blocks} rounds of {steps} steps of 8 sequences of {seq_len} tokens, on gloo with a thread a rank.

`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}.

| | all-gathers | MB each | reduce-scatters | MB each | speed |
|---|---:|---:|---:|---:|---:|
{rows}
"""


def page(measured: dict[str, Measured], arguments: argparse.Namespace) -> str:
    """The result, and what it depends on."""
    rows = []
    for name, found in measured.items():
        pairs = zip(measured["FSDP2"].seconds, found.seconds, strict=True)
        cells = [name]
        for kind in ("all-gathers", "reduce-scatters"):
            tally = found.tallies.get(kind)
            mean = f"{tally.bytes / tally.after / 1e6:.3f}" if tally else ""
            cells += [str(tally.after) if tally else "in hooks", mean]
        cells.append(spread([one / other for one, other in pairs]))
        rows.append(f"| {' | '.join(cells)} |")
    facts = {
        "command": " ".join(["python", "benchmarks/simple_fsdp.py", *sys.argv[1:]]),
        "device": pick().name,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    return PAGE.format(**vars(arguments), **facts, rows="\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10, help="blocks of each side")
    parser.add_argument("--steps", type=int, default=3, help="steps in a block")
    parser.add_argument("--seq_len", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--output", type=Path, help="file for the table")
    arguments = parser.parse_args()
    text = page(run_ranks(train, 2, arguments)[0], arguments)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
