"""Two runs on one folder: the second starts while the first trains, saves for the last time, or is
stopped. Together they do what one does alone, or one of them is refused."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.reliability.trials import (
    LIMIT,
    STEPS,
    End,
    at_call,
    checkpoints,
    damage,
    leftovers,
    recipe,
    wait_until,
)
from tests.runs import rows
from torchtitan import trainer
from torchtitan.checkpoint.folder import ENDING
from torchtitan.provenance import to_toml

TRIALS = {
    "the second starts at a random moment": 25,
    "the second starts during the last save of the first": 10,
    "the first is stopped by SIGTERM, and the second is its requeue": 9,
    "one of them through the launcher": 6,
}


def start(run, name, seed):
    """Start a run as from the command line, with slow steps and saves; return its process."""
    if not (child := os.fork()):
        try:
            chance = random.Random(f"{name} {seed}")
            slow("torchtitan.trainer:Trainer.step", chance.uniform(0, 0.05))
            slow("torchtitan.checkpoint.store:Disk.commit", chance.uniform(0, 0.2))
            with (run.parent / f"{name}.log").open("w", buffering=1) as sys.stderr:
                os._exit(trainer.main(["--job.config_file", str(run.parent / "recipe.toml")]))
        finally:
            os._exit(70)
    return child, lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def slow(place, seconds):
    """Let every call of a function take longer."""

    def later(function, *arguments):
        time.sleep(seconds)
        return function(*arguments)

    at_call(place, 0, later)()


def launch(run, name):
    """Start the run through the launcher."""
    command = [sys.executable, "-m", "torchtitan.launch", "--processes", "1"]
    words = ["--job.config_file", str(run.parent / "recipe.toml"), "--job.imports", "tests.tiny"]
    with (run.parent / f"{name}.log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([*command, *words], stdout=log, stderr=log, env=environment)
    return lambda: process.wait(LIMIT)


def says_ending(run):
    """Whether the holder of the lock is ending, or has ended."""
    try:
        return (run / "lock").read_text().strip().endswith(ENDING)
    except FileNotFoundError:
        return (run / f"checkpoint/step-{STEPS}").exists()


def two(kind, run, seed):
    """Start two runs; return their exit statuses."""
    chance = random.Random(f"{kind} {seed}")
    if kind == "one of them through the launcher":
        first = launch(run, "first")
        wait_until((run / "lock").exists)
        time.sleep(chance.uniform(0, 8))
    else:
        pid, first = start(run, "first", seed)
        if kind == "the second starts at a random moment":
            time.sleep(chance.uniform(0, 1))
        elif kind == "the second starts during the last save of the first":
            wait_until(lambda: says_ending(run))
        else:
            wait_until(lambda: (run / "metrics.jsonl").exists())
            time.sleep(chance.uniform(0, 0.5))
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: says_ending(run))
    _, second = start(run, "second", seed)
    return first(), second()


def cases():
    """All trials; the first of each kind is run daily, but for the launcher's."""
    return [
        pytest.param(kind, seed, marks=pytest.mark.slow if seed or "launcher" in kind else ())
        for kind, count in TRIALS.items()
        for seed in range(count)
    ]


@pytest.mark.parametrize(("kind", "seed"), cases())
def test_two_runs_on_one_folder_lose_nothing(kind, seed, tmp_path, undisturbed):
    run = tmp_path / "run"
    job = recipe(run, checkpoint={"keep_latest_k": 0})
    (tmp_path / "recipe.toml").write_text(to_toml(job))
    statuses = two(kind, run, seed)
    log = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    is_stopped = "SIGTERM" in kind
    assert set(statuses) <= {0, 2, *([75] if is_stopped else [])}, log
    assert 0 in statuses, log
    if 2 in statuses:
        assert f"another run writes into {run}" in log
        assert not is_stopped, log
    steps = [row["step"] for row in rows(run) if "loss" in row]
    assert steps == list(range(1, STEPS + 1)), log
    assert not list(run.glob("metrics.*.jsonl")), log
    saved = checkpoints(run)
    assert set(range(2, STEPS + 1, 2)) <= saved.keys()
    assert not [problem for path in saved.values() for problem in damage(path)]
    assert not leftovers(run)
    assert not (run / "lock").exists()
    End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)
