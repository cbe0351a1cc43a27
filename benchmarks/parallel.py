"""What each axis costs and saves at two ranks, beside one rank that does the same work.

    python benchmarks/parallel.py --output benchmarks/results/parallel.md

All sides train the debug model, 8 sequences of 256 tokens a step, float32, without recomputation:
one rank on one thread, two ranks on one thread each by every axis, and one rank on two threads. So
a machine with two free cores could be twice as fast with two ranks as with one.

All processes live throughout and the sides take turns, a block of steps each, while the others
sleep; the ratio is taken round by round, so that a machine that slows down slows all. Memory is the
peak of a process over what it had when torch was imported, with all that parallelism needs of it.
"""

import argparse
import importlib
import logging
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchtitan.build import build
from torchtitan.checks import load_job
from torchtitan.device import GIB, Device, pick
from torchtitan.logging import logger
from torchtitan.parallel import open_world
from torchtitan.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "train_configs/debug_model.toml"
BATCH, SEQ_LEN = 8, 256
ONE = "one rank"


class Side(NamedTuple):
    """Who trains, and how."""

    ranks: int
    threads: int
    sequences: int
    """Of a rank."""
    axis: str
    """The key of [parallelism] that has the ranks."""
    about: str


SIDES = {
    ONE: Side(1, 1, BATCH, "", ""),
    "DDP": Side(2, 1, BATCH // 2, "data_parallel_replicate_degree", "4 sequences a rank"),
    "FSDP": Side(2, 1, BATCH // 2, "data_parallel_shard_degree", "4 sequences a rank"),
    "TP": Side(2, 1, BATCH, "tensor_parallel_degree", "with sequence and loss parallelism"),
    "PP": Side(2, 1, BATCH, "pipeline_parallel_degree", "1F1B, 8 microbatches"),
    "CP": Side(2, 1, BATCH, "context_parallel_degree", "keys and values all at once"),
    "one rank, two threads": Side(1, 2, BATCH, "", "the same cores, no ranks"),
}


class Processes:
    """The ranks of a side, each waiting to be told to train a block."""

    def __init__(self, name: str, arguments: argparse.Namespace, folder: str) -> None:
        self.side = SIDES[name]
        given = [f"--{key}={getattr(arguments, key)}" for key in ("steps", "warmup", "seq_len")]
        given.append(f"--store={folder}/{name.replace(' ', '_')}")
        environment = os.environ | {"OMP_NUM_THREADS": str(self.side.threads)}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, f"--train={name}", f"--rank={rank}", *given],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(self.side.ranks)
        ]

    def ask(self, word: str) -> list[float]:
        """Tell all ranks; the answer of each, when all have come."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
        return self.answers()

    def answers(self) -> list[float]:
        found = []
        for process in self.ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(process.communicate()[1])
            found.append(float(line))
        return found


def train(arguments: argparse.Namespace) -> None:
    """One rank of a side: trains a block of steps at each line that comes in, and says how long."""
    logger.setLevel(logging.ERROR)
    side, device = SIDES[arguments.train], Device("cpu")
    torch.set_num_threads(side.threads)
    store = dist.FileStore(arguments.store, side.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=arguments.rank, world_size=side.ranks)
    with tempfile.TemporaryDirectory() as folder:
        words = f"""--job.dump_folder={folder} --no-checkpoint.enable --no-validation.enable
            --no-data.report_unigram_loss --training.steps=100000 --metrics.log_freq=100000
            --training.seq_len={arguments.seq_len} --training.local_batch_size={side.sequences}
            --training.global_batch_size={BATCH}"""
        degree = [f"--parallelism.{side.axis}={side.ranks}"] if side.axis else []
        job = load_job(RECIPE, [*words.split(), *degree], side.ranks, "cpu").config
        for module in ("tensor", "fsdp", "pipelining"):
            importlib.import_module(f"torch.distributed.{module}")
        before = resident()
        with open_world(job.degrees(side.ranks), job.comm, device) as world:
            run = build(job, world)
            with closing(run.batches), run.meter:
                trainer = Trainer(run)
                for _ in range(arguments.warmup):
                    trainer.step()
                print(0, flush=True)
                for line in sys.stdin:
                    if line == "memory\n":
                        print(device.memory_peak() - before, flush=True)
                        break
                    dist.barrier()
                    begin = time.perf_counter()
                    for _ in range(arguments.steps):
                        trainer.step()
                    dist.barrier()
                    print((time.perf_counter() - begin) / arguments.steps, flush=True)
    dist.destroy_process_group()


def resident() -> float:
    """GiB that this process has in memory."""
    found = re.search(r"^VmRSS:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024 / GIB


class Measured(NamedTuple):
    """Of a side: seconds a step in each block, GiB of the rank that has most."""

    seconds: list[float]
    memory: float


def take_turns(arguments: argparse.Namespace) -> dict[str, Measured]:
    """All sides, in turns."""
    names = [name for name in SIDES if name in (ONE, *arguments.sides)]
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: Processes(name, arguments, folder) for name in names}
        for side in sides.values():
            side.answers()
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for block in range(arguments.blocks):
            # Who goes first alternates, so that a trend favours nobody.
            for name in names[:: 1 if block % 2 else -1]:
                seconds[name].append(max(sides[name].ask("train")))
        memory = {name: max(side.ask("memory")) for name, side in sides.items()}
        for side in sides.values():
            for process in side.ranks:
                process.communicate()
    return {name: Measured(seconds[name], memory[name]) for name in names}


def spread(values: Sequence[float], digits: int) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


PAGE = """\
# Two ranks against one

<!-- Written by benchmarks/parallel.py. -->

One optimizer step of the debug model on {batch} sequences of {seq_len} tokens, float32, without
recomputation, on gloo; every rank has one thread. *Ratio* is to one rank: of tokens/s round by
round, median (quartiles) of {blocks} rounds of {steps} steps; of peak memory, what a process has
over an empty one with torch, the rank that has most.

`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}.

| | tokens/s | ratio | GiB a rank | ratio | |
|---|---:|---:|---:|---:|---|
{rows}
"""


def page(measured: dict[str, Measured], arguments: argparse.Namespace) -> str:
    """The result, and what it depends on."""
    one = measured[ONE]
    rows = []
    for name, found in measured.items():
        speed = [BATCH * arguments.seq_len / seconds for seconds in found.seconds]
        ratio = [a / b for a, b in zip(one.seconds, found.seconds, strict=True)]
        cells = (
            *(name, spread(speed, 0), spread(ratio, 2)),
            *(f"{found.memory:.3f}", f"{found.memory / one.memory:.2f}", SIDES[name].about),
        )
        rows.append(f"| {' | '.join(cells)} |")
    facts: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/parallel.py", *sys.argv[1:]]),
        "device": pick().name,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    sizes = {"batch": BATCH, **vars(arguments)}
    return PAGE.format(**sizes, **facts, rows="\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    others = [name for name in SIDES if name != ONE]
    parser.add_argument("--sides", nargs="+", choices=others, default=others)
    parser.add_argument("--blocks", type=int, default=12, help="blocks of each side")
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each side, not counted")
    parser.add_argument("--seq_len", type=int, default=SEQ_LEN, help="tokens in a sequence")
    parser.add_argument("--quick", action="store_true", help="see that it runs, measure nothing")
    parser.add_argument("--output", type=Path, help="file for the table")
    for key, kind in (("train", str), ("rank", int), ("store", str)):
        parser.add_argument(f"--{key}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.blocks, arguments.steps, arguments.warmup, arguments.seq_len = 2, 1, 1, 32
    if arguments.train:
        train(arguments)
        return
    text = page(take_turns(arguments), arguments)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
