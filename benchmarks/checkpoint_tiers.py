"""What a save costs in each tier of checkpoints, and what the loss of a node costs.

    python benchmarks/checkpoint_tiers.py --output benchmarks/results/checkpoint_tiers.md

Two ranks of FSDP stand for two nodes, each with a folder of its own for its frequent checkpoints.
Blocks of steps with a save at their begin take turns with blocks without: the difference is what a
save takes from training, the wait that of the call and of updates that wait for the copy. The rare
checkpoints are on the disk of `--folder`, the frequent ones there too, or in memory (/dev/shm).

For the losses, runs of a small model are killed after the same step, and start again after a folder
was deleted.
"""

import argparse
import json
import logging
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from checkpoint import FLAVORS, RECIPE, SIZES, recipe, spread

from torchtitan.build import build
from torchtitan.checkpoint import ResumePoint, choose_together
from torchtitan.checks import load_job
from torchtitan.device import Device, pick
from torchtitan.job import JobConfig
from torchtitan.local_ranks import RanksFailed, run_ranks
from torchtitan.logging import logger
from torchtitan.parallel import open_world
from torchtitan.parts import resume_policy
from torchtitan.trainer import Trainer

SHM = Path("/dev/shm")
MODES = {"disabled": "synchronous", "async": "asynchronous"}
RARE, FREQUENT, KILLED_AFTER = 20, 4, 38
"""Intervals of the runs that are killed, and their last step."""


class Side(NamedTuple):
    """Where a save goes."""

    is_rare: bool
    in_memory: bool = False
    replicas: int = 0


SIDES = {
    "rare, on disk": Side(is_rare=True),
    "frequent, on disk": Side(is_rare=False),
    "frequent, in /dev/shm": Side(is_rare=False, in_memory=True),
    "frequent, in /dev/shm, one replica": Side(is_rare=False, in_memory=True, replicas=1),
}


class Cost(NamedTuple):
    """What a save takes from training, a value for each round."""

    waited: list[float]
    """Steps that training waited."""
    slowed: list[float]
    """Steps that the block took longer."""
    a_step: list[float]
    """Seconds of a step without a save."""


def job_of(size: str, folder: Path, local: Path, steps: int, *more: str) -> JobConfig:
    """Two ranks, of which each has the frequent checkpoints of its node below `local`."""
    flags = [
        *recipe(size, folder),
        f"--training.steps={steps}",
        *("--parallelism.data_parallel_shard_degree=2", "--checkpoint.enable"),
        f"--checkpoint.frequent.folder={local}",
        *more,
    ]
    return load_job(RECIPE, flags, 2, "cpu").config


def on_its_node(job: JobConfig) -> JobConfig:
    """Give this rank, a node of its own, a folder of its own."""
    frequent = job.checkpoint.frequent
    own = frequent.model_copy(update={"folder": f"{frequent.folder}-{dist.get_rank()}"})
    return job.model_copy(
        update={"checkpoint": job.checkpoint.model_copy(update={"frequent": own})}
    )


def measure(job: JobConfig, is_rare: bool, rounds: int, steps: int) -> Cost:
    """Measure saves of one tier on this rank."""
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    job, cost = on_its_node(job), Cost([], [], [])
    with open_world(job.degrees(2), job.comm, Device("cpu")) as world:
        run = build(job, world)
        with closing(run.batches), run.meter:
            run.checkpoint.load(ResumePoint(None))
            trainer, saver = Trainer(run), run.checkpoint.savers[0 if is_rare else 1]
            trainer.step()
            for number in range(-1, rounds):  # the first is not counted
                seconds, waited = {}, 0.0
                for with_save in (True, False)[:: 1 if number % 2 else -1]:
                    dist.barrier()
                    begin, staged = time.perf_counter(), saver.staging.waited
                    if with_save:
                        run.checkpoint.save(finished=False, final=is_rare)
                        waited = time.perf_counter() - begin
                    for _ in range(steps):
                        trainer.step()
                        run.after_step(run.state)
                    dist.barrier()
                    seconds[with_save] = time.perf_counter() - begin
                    waited += saver.staging.waited - staged
                    run.checkpoint.wait_until_idle()
                if number >= 0:
                    a_step = seconds[False] / steps
                    cost.a_step.append(a_step)
                    cost.waited.append(waited / a_step)
                    cost.slowed.append((seconds[True] - seconds[False]) / a_step)
    return cost


def costs(size: str, folder: Path, rounds: int, steps: int) -> dict[str, dict[str, Cost]]:
    """Return what saves cost, by mode and side."""
    found: dict[str, dict[str, Cost]] = {mode: {} for mode in MODES}
    for mode, of_mode in found.items():
        for name, side in SIDES.items():
            place = Path(tempfile.mkdtemp(dir=SHM if side.in_memory else folder))
            local = f"--checkpoint.frequent.replicas={side.replicas}"
            more = ["--checkpoint.interval=1000000", "--checkpoint.frequent.interval=999999"]
            more += [f"--checkpoint.async_mode={mode}", "--checkpoint.keep_latest_k=1", local]
            job = job_of(size, folder / "run", place / "disk", 2_000_000, *more)
            try:
                of_mode[name] = run_ranks(measure, 2, job, side.is_rare, rounds, steps)[0]
            finally:
                shutil.rmtree(place)
                shutil.rmtree(folder / "run", ignore_errors=True)
    return found


def started(job: JobConfig, kill_after: int) -> int:
    """Start this rank; return the step that it starts from."""
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    job = on_its_node(job)
    with open_world(job.degrees(2), job.comm, Device("cpu")) as world:
        start = choose_together(resume_policy(job), world)
        run = build(job, world)
        with closing(run.batches), run.meter:
            run.checkpoint.load(start)
            first = run.state.step
            while kill_after and run.state.step < kill_after:
                Trainer(run).step()
                run.after_step(run.state)
            if kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
        return first


def losses(folder: Path) -> dict[str, int]:
    """Return how many steps are trained again, by what was lost."""
    cases = {
        "a process; rare checkpoints only": (0, 0, False),
        "a process": (FREQUENT, 0, False),
        "a node": (FREQUENT, 0, True),
        "a node, with one replica": (FREQUENT, 1, True),
    }
    found = {}
    for number, (name, (interval, replicas, is_node)) in enumerate(cases.items()):
        place = folder / str(number)
        more = [f"--checkpoint.interval={RARE}", f"--checkpoint.frequent.interval={interval}"]
        more += [f"--checkpoint.frequent.replicas={replicas}"] * bool(replicas)
        local = place / "disk" if interval else Path("frequent")
        job = job_of("small", place / "run", local, 1000, *more)
        try:
            run_ranks(started, 2, job, KILLED_AFTER)
        except RanksFailed as error:
            if -signal.SIGKILL not in error.codes:
                raise
        if is_node:
            shutil.rmtree(place / "disk-1")
        found[name] = KILLED_AFTER - run_ranks(started, 2, job, 0)[0]
    return found


PAGE = """\
# Two tiers of checkpoints

<!-- Written by benchmarks/checkpoint_tiers.py. -->

Two ranks of FSDP, one thread each, stand for two nodes; each writes half of {megabytes:,.0f} MB.
*Waits* is how long training stands still for a save: the call, and updates that wait for the
copy. *In all* is what a block of {steps} steps with a save takes longer than one without; both in
steps of {a_step:.2f} s, median (quartiles) of {rounds} blocks.

`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}.
The load average was {load}, and the ranks are two processes. Quartiles that are more than a step
apart show what else ran rather than the cost of a save, which only the waits can be compared by.

| save | waits, synchronous | in all | waits, asynchronous | in all |
|---|---:|---:|---:|---:|
{rows}

Runs with a rare checkpoint every {rare} steps and a frequent one every {frequent} are killed after
step {killed}, and start again:

| lost | steps that are trained again |
|---|---:|
{lost}

On average, a loss at any moment costs half of the interval of the newest checkpoint that is left.
"""


def page(found: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Write the page."""
    rows = []
    for name in SIDES:
        cells = [
            spread(found["costs"][mode][name][key])
            for mode in MODES
            for key in ("waited", "slowed")
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    steps = [
        s for each in found["costs"].values() for cost in each.values() for s in cost["a_step"]
    ]
    return PAGE.format(
        rows="\n".join(rows),
        lost="\n".join(f"| {name} | {steps} |" for name, steps in found["losses"].items()),
        a_step=statistics.median(steps),
        rare=RARE,
        frequent=FREQUENT,
        killed=KILLED_AFTER,
        **about,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="middle")
    parser.add_argument("--rounds", type=int, default=7, help="of each side")
    parser.add_argument("--steps", type=int, default=4, help="in a block")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; absent: temporary")
    parser.add_argument("--quick", action="store_true", help="see that it runs, measure nothing")
    parser.add_argument("--output", type=Path, help="file for the page; beside it the numbers")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size, arguments.rounds, arguments.steps = "small", 2, 1
    logger.setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        by_mode = costs(arguments.size, folder, arguments.rounds, arguments.steps)
        found = {
            "costs": {
                mode: {side: cost._asdict() for side, cost in each.items()}
                for mode, each in by_mode.items()
            },
            "losses": losses(folder),
        }
    about = {
        "command": " ".join(["python", "benchmarks/checkpoint_tiers.py", *sys.argv[1:]]),
        "megabytes": megabytes(arguments.size),
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "device": pick().name,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load": f"{os.getloadavg()[0]:.0f}",
    }
    text = page(found, about)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
        kept = {"about": about, **found}
        arguments.output.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")


def megabytes(size: str) -> float:
    """Return the size of a checkpoint: weights and Adam's two moments, in float32."""
    from torchtitan.models.llama3.spec import LLAMA3
    from torchtitan.models.spec import build_empty

    network = build_empty(LLAMA3.build, FLAVORS[size], 256)
    return 12 * sum(p.numel() for p in network.parameters()) / 1e6


if __name__ == "__main__":
    main()
