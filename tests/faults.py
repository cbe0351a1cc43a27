"""Breaks one rank at one step, for job.imports: FAULT="kill 1 3" kills rank 1 at step 3.

A run that an elastic agent has started again stays well. FAULT="slow 0 0" breaks nothing, but gives
time to do so from outside, until there is a file `hurry` in the run's folder.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.build import Run
from torchtitan.parallel import Launch
from torchtitan.trainer import Trainer

KIND, RANK, STEP = os.environ["FAULT"].split()
healthy_step = Trainer.step


def step(trainer: Trainer) -> None:
    if KIND == "slow" and not Path(trainer.run.checkpoint.choice.dump_folder, "hurry").exists():
        time.sleep(0.1)
    if trainer.run.state.step + 1 == int(STEP) and not Launch.read().restart:
        trainer.run.batches.before_step()
        if trainer.run.agree.world.rank == int(RANK):
            break_down(trainer.run)
        elif KIND == "silent":
            dist.recv(torch.empty(1), src=int(RANK))
    healthy_step(trainer)


def break_down(run: Run) -> None:
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


Trainer.step = step  # type: ignore[method-assign]
