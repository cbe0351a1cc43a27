"""A rank that dies or hangs ends the run within the timeout, and it is said which, where, when."""

import os
import re
import signal
import subprocess

import pytest

from tests.test_launch import PIPED, RECIPE, ROOT, SMALL, environment
from tests.tiers import tiers
from torchtitan.flight_recorder import read_traces

TINY = [
    *("--job.imports=tests.tiny,tests.faults", "--model.name=tiny", "--model.flavor=tiny"),
    *("--training.steps=1000", "--comm.train_timeout_seconds=20"),
    # Fewer than a step has, so that the report comes from a ring that has gone round.
    "--comm.trace_buf_size=8",
]
# Seconds; without a timeout of ours a run that hangs would take far longer than this.
BOUND = 150

# What happens to rank 1 at step 3, and what is said of it.
FAULTS = {
    "kill": "rank 1 was killed from outside at step 3 and left no message",
    "raise": "rank 1 raised ValueError: a rank that fails at step 3, in tests/faults.py:",
    "abort": "rank 1 crashed at step 3: Aborted at tests/faults.py:",
    "sleep": "rank 1 hung at step 3 outside communication, in tests/faults.py:",
    "silent": "rank 1 hung at step 3 outside communication, in tests/faults.py:",
    "freeze": "rank 1 stopped responding (frozen, or disconnected) at step 3",
}
# What is said of rank 0.
WAITED = (
    r"rank 0 waited at step 3 in all_reduce #\d+ on all \(ranks 0 and 1\) of int64 .* for rank 1"
)
RECEIVED = r"rank 0 waited at step 3 in a send or receive, in tests/faults.py"


def run(fault, folder):
    """Status and output of two ranks, the second of which breaks at step 3.

    A forked rank would have the ring that this process has, if another test has made one.
    """
    words = [*SMALL, *TINY, f"--job.dump_folder={folder}"]
    own = environment(NGPU="2", CONFIG_FILE=RECIPE, MAX_RESTARTS="0", FAULT=f"{fault} 1 3")
    of = {"cwd": ROOT, "env": own, "start_new_session": True, **PIPED}
    process = subprocess.Popen(["./run_train.sh", *words], **of)
    try:
        output, _ = process.communicate(timeout=BOUND)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


@pytest.mark.costs("starts a Python for each rank")
@pytest.mark.parametrize("fault", tiers(FAULTS, ["raise"], gate=["kill"]))
def test_failure_ends_the_run_and_is_explained(fault, tmp_path, says):
    status, output = run(fault, tmp_path)
    assert status == 1, output
    assert FAULTS[fault] in output
    assert re.search(RECEIVED if fault == "silent" else WAITED, output), output

    folder = tmp_path / "comm_traces"
    told = says("trace", folder)
    assert says("trace", tmp_path) == told
    traceback = folder / "1.traceback"
    where = f"traceback: {traceback}\n" if fault == "raise" else ""
    assert output.endswith(f"{told}{where}traces of all ranks: {folder}\n"), "the report is last"
    assert "Traceback" not in output
    assert "[rank 0]" not in output, "the launcher names the rank"
    assert not where or traceback.read_text().endswith("ValueError: a rank that fails\n")
    assert told.startswith("rank 1 "), "what went wrong comes first"
    traces = read_traces(folder)
    assert traces[0].collectives
    assert bool(traces[1].collectives) == (fault in ("raise", "sleep", "silent"))
