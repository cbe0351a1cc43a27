"""Training as it is started: by the script, by itself, by torchrun on two nodes; and stopped."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import launched
from tests.launched import OURS
from tests.ranks import free_port
from tests.runs import losses
from tests.tiers import tiers
from torchtitan import trainer
from torchtitan.checkpoint import saved_steps
from torchtitan.cluster.launcher import LaunchOptions, with_nodes
from torchtitan.flight_recorder import read_note

ROOT = Path(__file__).parent.parent
RECIPE = "train_configs/debug_model.toml"
NUMBERS = itertools.count()
TINY = ["--job.imports=tests.tiny", "--model.name=tiny", "--model.flavor=tiny"]
TRAIN = [*OURS, "train", RECIPE]
SMALL = [
    *("--training.local_batch_size=2", "--training.seq_len=32", "--metrics.log_freq=1"),
    *("--validation.steps=1", "--no-data.report_unigram_loss"),
]
PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def environment(**variables):
    """This interpreter as the active environment, on one thread."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | variables


def start(command, folder, *flags, before=lambda: None, **variables):
    """Start a run; a launcher of ours is forked from this process."""
    words = [*command, *SMALL, f"--job.dump_folder={folder}", *flags]
    if command[:3] == OURS:
        log = folder.parent / f"{folder.name}-{next(NUMBERS)}.log"
        return launched.start(words, environment(**variables), log, before=before)
    return subprocess.Popen(words, cwd=ROOT, env=environment(**variables), **PIPED)


@pytest.mark.parametrize(("processes", "threads"), [(1, None), (2, "1")])
def test_a_process_alone_computes_on_all_cores(processes, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert with_nodes(LaunchOptions(processes), lambda _: 0) == 0
    assert os.environ.get("OMP_NUM_THREADS") == threads


def finish(process, status=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


def wait_for_step(folder, step, process):
    while not (folder / "metrics.jsonl").exists() or len(losses(folder)) < step:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def test_launcher_shows_the_first_rank_and_does_not_restart_without_checkpoints(tmp_path):
    words = [*TRAIN, *TINY, "--processes=2"]
    one = finish(start(words, tmp_path, "--training.steps", "2", "--no-checkpoint.enable"))
    assert "Automatic restarts are off because checkpoint.enable = false.\n" in one
    assert re.search(r"\[rank0\].*step 2/2", one)
    assert not re.search(r"\[rank1\]", one)
    assert list(losses(tmp_path)) == [1, 2]


@pytest.mark.parametrize("processes", tiers(["1", "2"], ["2"], ["1"]))
def test_script_tells_a_mistake_once_without_a_traceback(processes, tmp_path):
    process = start(["./run_train.sh"], tmp_path / "a", "--training.stps=2", NGPU=processes)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    mistake, suggestion, _ = output.splitlines()
    assert mistake == "error: --training.stps: unknown key"
    assert suggestion == "  did you mean training.steps?"
    assert not (tmp_path / "a").exists()


# Exit statuses of a run that is saved; see `ExitCode`.
STOPS = [(signal.SIGINT, 0), (signal.SIGTERM, 75), (signal.SIGHUP, 75)]


@pytest.mark.parametrize(("number", "status"), tiers(STOPS, [], gate=[STOPS[1]]))
def test_one_process_is_stopped_and_goes_on_to_the_same_numbers(number, status, tmp_path):
    command = [sys.executable, "-m", "torchtitan.train", "--job.config_file", RECIPE]
    flags = (*TINY, "--training.steps=8")
    # With a Python of its own, and with time in which to stop it.
    held = (f"{TINY[0]},tests.faults", *flags[1:])
    stopped = start(command, tmp_path / "stopped", *held, FAULT="hold 0 6")
    wait_for_step(tmp_path / "stopped", 3, stopped)
    stopped.send_signal(number)
    assert "finishing this step, then saving" in finish(stopped, status)
    assert 3 <= max(saved_steps(tmp_path / "stopped/checkpoint")) < 8

    finish(start(TRAIN, tmp_path / "stopped", *flags))
    finish(start(TRAIN, tmp_path / "whole", *flags))
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_signal_to_the_launcher_is_passed_on_and_loses_nothing(tmp_path):
    process = start([*TRAIN, *TINY, "--processes=2"], tmp_path, "--training.steps=100000")
    wait_for_step(tmp_path, 3, process)
    process.send_signal(signal.SIGTERM)
    finish(process, 75)
    saved = max(saved_steps(tmp_path / "checkpoint"))
    assert saved == max(losses(tmp_path)) < 100_000


@pytest.mark.parametrize(
    "words", [[], pytest.param(["--processes=2"], marks=pytest.mark.gate)], ids=["one", "launcher"]
)
def test_a_signal_after_the_last_save_leaves_a_finished_run(words, tmp_path):
    """Ranks take their time to leave; the launcher passes the signal on to them."""
    status, send, signalled = trainer.exit_status, os.kill, tmp_path / "signalled"

    def slow_status(*arguments):
        while not signalled.exists():
            time.sleep(0.05)
        return status(*arguments)

    def send_and_tell(pid, number):
        send(pid, number)
        signalled.touch()

    def slow_to_leave():
        """In the forked process alone, and in the ranks that it forks."""
        trainer.exit_status = slow_status
        os.kill = send_and_tell

    flags = [*TINY, *words, "--training.steps=2"]
    process = start([*TRAIN, *flags], tmp_path, before=slow_to_leave)
    note = tmp_path / "comm_traces/0.step"
    while not note.exists() or read_note(note).get("state") != "finished":
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    if not words:
        signalled.touch()
    finish(process)
    assert max(saved_steps(tmp_path / "checkpoint")) == 2


@pytest.mark.parametrize(("number", "status"), tiers(STOPS, [], gate=[STOPS[2]]))
def test_signal_to_the_script_is_passed_on_and_loses_nothing(number, status, tmp_path):
    """And the script shows the ranks asked for."""
    two = {"NGPU": "2", "CONFIG_FILE": RECIPE, "LOG_RANK": "0,1"}
    process = start(["./run_train.sh"], tmp_path, *TINY, "--training.steps=100000", **two)
    wait_for_step(tmp_path, 3, process)
    process.send_signal(number)
    both = finish(process, status)
    assert re.search(r"\[rank0\]", both)
    assert re.search(r"\[rank1\]", both)
    saved = max(saved_steps(tmp_path / "checkpoint"))
    assert saved == max(losses(tmp_path)) < 100_000


@pytest.mark.gate
def test_torchrun_on_two_nodes(tmp_path):
    port = free_port()
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nnodes=2", "--nproc_per_node=1"]
    rendezvous = ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=test"]
    train = ["-m", "torchtitan.train", "--job.config_file", RECIPE]
    nodes = [
        start([*torchrun, *rendezvous, *train], tmp_path, "--training.steps=2") for _ in range(2)
    ]
    for node in nodes:
        finish(node)
    assert list(losses(tmp_path)) == [1, 2]
