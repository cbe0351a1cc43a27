"""Makes two replica groups wait for each other, for job.imports: it does not matter who is slow.

MEETING is a folder where each rank says that it has come; it begins when its peer has come too.
With FAULT="kill 1 3" the last rank of group 1 is killed amidst step 3, and group 0 waits after
step 6 until group 1 has come back. Some targets are hidden, so that groups have unlike numbers.
"""

import os
import signal
import time
from pathlib import Path

from torchtitan.parallel import Launch
from torchtitan.tools.verify.measure import hide_targets
from torchtitan.trainer import Trainer

FOLDER = Path(os.environ["MEETING"])
FAULT, GROUP, STEP = os.environ.get("FAULT", "none 9 9").split()
healthy_step = Trainer.step
PREPARED = []


def step(trainer):
    run, launch, done = trainer.run, Launch.read(), trainer.run.state.step
    group = run.guard.group.config.group
    if trainer not in PREPARED:
        PREPARED.append(trainer)
        run.batches.stream = map(hide_targets, run.batches.stream)
        (FOLDER / f"{group} {launch.rank} {launch.restart}").touch()
        wait_for(f"{1 - group} {launch.rank} 0")
    if FAULT == "kill":
        time.sleep(0.05)
        is_last = launch.rank == launch.size - 1
        if group == int(GROUP) and is_last and not launch.restart and done + 1 == int(STEP):
            run.guard.group.sum = lambda tensors: os.kill(os.getpid(), signal.SIGKILL)
        if group != int(GROUP) and done == int(STEP) + 3:
            wait_for(f"{GROUP} {launch.rank} 1")
    healthy_step(trainer)


def wait_for(name):
    until = time.monotonic() + 120
    while not (FOLDER / name).exists():
        assert time.monotonic() < until, f"{name} has not come"
        time.sleep(0.02)


Trainer.step = step
