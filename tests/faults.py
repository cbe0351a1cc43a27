"""Breaks one rank at one step, for job.imports: FAULT="kill 1 3" kills rank 1 at step 3.

A run that an elastic agent has started again stays well. FAULT="slow 0 0" breaks nothing, but gives
time to do so from outside, until there is a file `hurry` in the run's folder. FAULT="save 0 0" does
the same, and gives time during each save too. With FAULT="hold 0 6" all ranks wait before step 6
until one of them is asked to stop.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.checkpoint import saver
from torchtitan.checkpoint.storage import write_file
from torchtitan.parallel import Launch
from torchtitan.trainer import Trainer

KIND, RANK, STEP = os.environ["FAULT"].split()
healthy_step = Trainer.step


def step(trainer):
    if KIND in ("slow", "save") and not is_in_hurry(
        Path(trainer.run.checkpoint.choice.dump_folder)
    ):
        time.sleep(0.1)
    if KIND == "hold" and trainer.run.state.step + 1 == int(STEP):
        hold(trainer.run)
    elif trainer.run.state.step + 1 == int(STEP) and not Launch.read().restart:
        for call in trainer.run.batches.before_step:
            call()
        if trainer.run.agree.world.rank == int(RANK):
            break_down(trainer.run)
        elif KIND == "silent":
            dist.recv(torch.empty(1), src=int(RANK))
    healthy_step(trainer)


def hold(run):
    folder = Path(run.checkpoint.choice.dump_folder)
    while not is_in_hurry(folder):
        if run.stop.requested:
            (folder / "hurry").touch()
        time.sleep(0.01)


def is_in_hurry(folder):
    return (folder / "hurry").exists()


def write_slowly(file, pieces):
    """Rank 0 takes its time, so that the others wait for it in the save."""
    written = write_file(file, pieces)
    if file.name == "rank-0.safetensors" and not is_in_hurry(file.parents[2]):
        time.sleep(3.0)
    return written


def break_down(run):
    match KIND:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "abort":
            os.abort()
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise ValueError("a rank that fails")
        case "sleep" | "silent":
            while True:
                time.sleep(60)
        case "deviate":
            run.agree.world.max(torch.zeros(7))


Trainer.step = step
if KIND == "save":
    saver.write_file = write_slowly
