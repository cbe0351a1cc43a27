"""Starts several processes on this machine by torchrun, for run_train.sh.

torchrun answers Ctrl-C and SIGTERM by ending its workers with an error, and a worker's mistake with
a traceback of its own. Here a wrong recipe is told before anything starts, a signal asks the
workers to save and go, the exit status is theirs, and after a failure the traces that they left are
told in plain words.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torchtitan.config import ConfigError
from torchtitan.device import pick
from torchtitan.flight import read_traces, report
from torchtitan.job import JobConfig
from torchtitan.train import choose, read, refuse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the workers to their end; returns the exit status of the first that failed, or 0."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan.launch", description=__doc__)
    parser.add_argument("--processes", type=int, required=True, help="workers to start")
    parser.add_argument("--log-rank", default="0", help="ranks whose output is shown: 0,1")
    arguments, words = parser.parse_known_args(argv)
    try:
        job = read(words, arguments.processes, pick().type).config
        choose(job)
    except ConfigError as error:
        return refuse(error)

    # The terminal sends Ctrl-C to the workers too, so this process only has to outlive them.
    # (A handler, because a signal that is ignored would be ignored by the workers as well.)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGTERM, _ask_workers)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.time()
    status = _torchrun(
        [
            f"--nproc_per_node={arguments.processes}",
            "--rdzv_backend=c10d",
            "--rdzv_endpoint=localhost:0",
            f"--local-ranks-filter={arguments.log_rank}",
            "--role=rank",
            "--tee=3",
            "--signals-to-handle=SIGQUIT",
            "-m",
            "torchtitan.train",
            *words,
        ]
    )
    if status:
        _explain(job, began)
    return status


def _torchrun(words: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} ended with status {failure.exitcode}", file=sys.stderr)
        return int(failure.exitcode) if failure.exitcode > 0 else 1
    return 0


def _explain(job: JobConfig, began: float) -> None:
    """Say what the ranks of this run left, where it tells of a failure."""
    folder = Path(job.job.dump_folder).expanduser() / job.comm.save_traces_folder
    if not any(folder.glob("*.step")):
        return
    traces = [trace for trace in read_traces(folder) if trace.time >= began]
    if any(trace.fate != "done" for trace in traces):
        print(*report(traces), f"traces: {folder}", sep="\n", file=sys.stderr)


def _ask_workers(number: int, frame: FrameType | None) -> None:
    found = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True)
    for worker in found.stdout.split():
        try:
            os.kill(int(worker), signal.SIGTERM)
        except ProcessLookupError:
            continue  # pgrep itself, or a worker that has just ended


if __name__ == "__main__":
    sys.exit(main())
