"""Watches each rank of a run from inside, for job.imports, and gives it a disk that is slow.

SOAK="FOLDER SECONDS": every 50th step adds a line to FOLDER/RANK.jsonl, and each file of a
checkpoint takes SECONDS longer to write.
"""

import json
import os
import time
from pathlib import Path

from tests.ranks import descendants
from torchtitan.checkpoint import saver
from torchtitan.trainer import Trainer

EVERY = 50
"""Steps between two samples."""
PAGE = os.sysconf("SC_PAGE_SIZE")
FOLDER, SECONDS = os.environ["SOAK"].split()
unwatched_step, write_fast = Trainer.step, saver.write_file


def step(trainer):
    unwatched_step(trainer)
    if trainer.run.state.step % EVERY == 0:
        with (Path(FOLDER) / f"{os.environ.get('RANK', '0')}.jsonl").open("a") as log:
            log.write(json.dumps({"step": trainer.run.state.step} | sample()) + "\n")


def sample():
    """What this process holds, and the seconds since it began: all, and of its processors."""
    mine = Path("/proc/self")
    return {
        "resident": int((mine / "statm").read_text().split()[1]) * PAGE,
        "files": len(list((mine / "fd").iterdir())),
        "threads": len(list((mine / "task").iterdir())),
        "processes": len(descendants(os.getpid())),
        "wall": time.monotonic(),
        "processor": time.process_time(),
    }


def write_slowly(*arguments, write=write_fast):
    time.sleep(float(SECONDS))
    return write(*arguments)


Trainer.step = step
saver.write_file = write_slowly
