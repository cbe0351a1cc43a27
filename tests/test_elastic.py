"""Runs that heal themselves: a rank or a node that dies, signals, Slurm, exit statuses."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from tests import launched
from tests.launched import OURS
from tests.ranks import descendants, free_port, run_ranks
from tests.runs import losses, rows, train
from tests.tables import table
from tests.test_launch import RECIPE, ROOT, SMALL, environment, wait_for_step
from torchtitan import trainer
from torchtitan.checkpoint import saved_steps
from torchtitan.checks import load_job
from torchtitan.cluster import launcher, rendezvous
from torchtitan.flight_recorder import read_note
from torchtitan.resilience.exit_codes import ExitCode
from torchtitan.tools.cli import main
from torchtitan.trainer import Trainer

TINY = ["--job.imports=tests.tiny,tests.faults", "--model.name=tiny", "--model.flavor=tiny"]
BATCH = ["--training.global_batch_size=4", "--checkpoint.interval=2"]
FLAGS = [*SMALL, *TINY, *BATCH]
NEVER = "raise 9 9"
DIVERGING = ["--optimizer.lr=1e38", "--lr_scheduler.warmup_steps=0"]


def command(folder, *flags, **options):
    """The launcher's command line; options are its own."""
    own = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    recipe = [RECIPE, *FLAGS, f"--job.dump_folder={folder}", *flags]
    return [*OURS, "train", *recipe, *own]


@contextmanager
def started(words, log, before=lambda: None, **variables):
    """A process in a group of its own, of which nothing is left afterwards."""
    own = environment(**{"FAULT": NEVER} | variables)
    process = launched.start(words, own, log, before=before)
    try:
        yield process
    finally:
        if process.poll() is None:
            kill(process)


def kill(process):
    """As a machine does that loses its power: the launcher and its ranks, which have groups."""
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def undisturbed(folder, *flags):
    """Losses of the same recipe on one rank that nobody disturbs."""
    words = [*FLAGS, f"--job.dump_folder={folder}", *flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT", NEVER)
        job = load_job(ROOT / RECIPE, words, 1, "cpu").config
        run_ranks(train, 1, job)
    return losses(folder)


def notes(folder):
    """What the ranks note at each step: pid, step. Nodes of a test share one memory."""
    first = [read_note(path) for path in (folder / "comm_traces").glob("*.step")]
    return [read_note(folder / note.get("kept_at", "")) or note for note in first if note]


@pytest.mark.gate
def test_killed_rank_is_started_again_from_the_checkpoint(tmp_path):
    words = command(tmp_path / "run", "--training.steps=5", processes="2")
    with started(words, tmp_path / "log", FAULT="kill 1 4") as process:
        status = process.wait(timeout=300)
    output = (tmp_path / "log").read_text()
    assert status == 0, output
    assert "rank 1 was killed from outside at step 4" in output
    assert "rank 1 was killed by SIGKILL; restart 1 of 3" in output
    assert f"restart 1 of 3: 2 ranks, from {tmp_path}/run/checkpoint/step-2" in output
    (event,) = [row for row in rows(tmp_path / "run") if "event" in row]
    expected = {"step": 2, "event": "restart", "restart": 1, "ranks": 2, "time": event["time"]}
    assert event == expected
    assert losses(tmp_path / "run") == pytest.approx(
        undisturbed(tmp_path / "whole", "--training.steps=5"), rel=1e-5
    )


@pytest.mark.parametrize(
    ("number", "flags", "status", "told"),
    [
        (signal.SIGUSR1, [], 75, "SIGUSR1: finishing this step"),
        (signal.SIGTERM, [], 75, "SIGTERM: finishing this step"),
        (signal.SIGINT, [], 0, "SIGINT: finishing this step"),
        (signal.SIGHUP, [], 75, "SIGHUP: finishing this step"),
        (signal.SIGUSR1, ["--training.steps=3"], 0, "finished at step 3"),
        (signal.SIGTERM, ["--no-checkpoint.enable"], 1, "stopped at step 3 of 100; nothing is"),
    ],
)
def test_status_of_one_process_that_is_stopped(number, flags, status, told, tmp_path):
    words = [RECIPE, *FLAGS, f"--job.dump_folder={tmp_path / 'run'}", *flags]
    run_ranks(stop_at, 1, 3, words, number, status, tmp_path / "log")
    assert told in (tmp_path / "log").read_text()


IF_KILLED = r"s, but the run may be killed after 1e-09 s \(TORCHTITAN_GRACE_SECONDS\); if it is, it"


@pytest.mark.parametrize(
    ("mode", "at_step", "grace", "told"),
    [
        ("disabled", 3, "", r"the last save took \S+ s; the newest is of step 2"),
        (
            "disabled",
            3,
            "1e-9",
            rf"WARNING .* took \S+ {IF_KILLED} resumes from step 2, the newest",
        ),
        ("disabled", 1, "1e-9", rf"WARNING a save is expected to take \S+ {IF_KILLED} starts over"),
        # Nor is one finished that is still being written.
        ("async", 3, "900", r"a save is expected to take \S+ s; none is finished yet"),
    ],
)
def test_stopped_run_compares_a_save_with_the_grace_period(mode, at_step, grace, told, tmp_path):
    words = [RECIPE, *FLAGS, f"--job.dump_folder={tmp_path / 'run'}"]
    words += [f"--checkpoint.async_mode={mode}"]
    run_ranks(stop_at, 1, at_step, words, signal.SIGTERM, 75, tmp_path / "log", grace)
    assert re.search(rf"SIGTERM: finishing this step.*\n.*{told}", (tmp_path / "log").read_text())


def test_status_of_one_process_that_diverges(tmp_path):
    words = [RECIPE, *FLAGS, f"--job.dump_folder={tmp_path / 'run'}", *DIVERGING]
    run_ranks(ends_with, 1, [*words, "--training.max_skipped_steps=1"], ExitCode.DIVERGED)


def test_run_says_that_its_last_steps_were_skipped(tmp_path):
    words = [RECIPE, *FLAGS, f"--job.dump_folder={tmp_path / 'run'}", *DIVERGING]
    run_ranks(logged, 1, [*words, "--training.steps=3"], 0, tmp_path / "log")
    told = "the last 2 steps were skipped (not finite, or spikes): the weights are those"
    assert f"{told} after step 1" in (tmp_path / "log").read_text()


def ends_with(words, status):
    os.environ["FAULT"] = NEVER
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    assert trainer.main(words) == status


def stop_at(at_step, words, number, status, log, grace=""):
    step = Trainer.step

    def interrupted(trainer):
        if trainer.run.state.step + 1 == at_step:
            os.kill(os.getpid(), number)
        return step(trainer)

    Trainer.step = interrupted
    os.environ["TORCHTITAN_GRACE_SECONDS"] = grace
    logged(words, status, log)


def logged(words, status, log):
    with log.open("w") as sys.stderr:
        ends_with(words, status)


SLURM = {
    "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" >> "$FOLDER/requeued"; fi',
    "srun": 'echo $$ > "$FOLDER/pid"; exec "$@"',
}


def slurm(tmp_path, *flags, gpus):
    """The words that Slurm would run the script by, with its commands played in `tmp_path`."""
    for name, body in SLURM.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "FOLDER": tmp_path,
        "PATH": f"{tmp_path}:{environment()['PATH']}",
        "CONFIG_FILE": RECIPE,
        "SLURM_SUBMIT_DIR": ROOT,
        "SLURM_JOB_ID": random.randrange(10_000),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": 1,
        "SLURM_GPUS_PER_TASK": gpus,
    }
    given = [f"{name}={value}" for name, value in variables.items()]
    run = [*FLAGS, f"--job.dump_folder={tmp_path / 'run'}", *flags]
    return ["env", *given, "bash", "multinode_trainer.slurm", *run]


@pytest.mark.gate
def test_slurm_job_is_queued_again_until_it_is_finished(tmp_path):
    with started(slurm(tmp_path, "--training.steps=9999", gpus=2), tmp_path / "log") as job:
        wait_for_step(tmp_path / "run", 3, job)
        # Slurm may signal every process of a job step, and the launcher passes it on as well.
        ranks = [note["pid"] for note in notes(tmp_path / "run")]
        for pid in (int((tmp_path / "pid").read_text()), *ranks):
            os.kill(pid, signal.SIGUSR1)
        assert job.wait(timeout=300) == 75, (tmp_path / "log").read_text()
    saved = max(saved_steps(tmp_path / "run/checkpoint"))
    assert saved == max(losses(tmp_path / "run"))
    (asked,) = (tmp_path / "requeued").read_text().splitlines()
    assert asked.startswith("requeue ")

    again = slurm(tmp_path, f"--training.steps={saved + 1}", gpus=1)
    with started(again, tmp_path / "log") as job:
        assert job.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    assert max(losses(tmp_path / "run")) == saved + 1
    assert len((tmp_path / "requeued").read_text().splitlines()) == 1


@pytest.mark.slow
def test_nodes_come_and_go_and_the_run_stays_the_same(tmp_path):
    folder, steps = tmp_path / "run", "--training.steps=300"
    port = free_port()
    words = command(
        folder,
        steps,
        processes="1",
        nnodes="1:2",
        rdzv_endpoint=f"localhost:{port}",
        # A node that is silent for ten seconds is gone; a busy machine may keep one waiting.
        rdzv_conf="last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10",
    )

    def wait_for_ranks(count, process):
        """Until so many ranks have done three more steps."""
        last = max((note["step"] for note in notes(folder)), default=0)
        while [note["step"] > last + 3 for note in notes(folder)] != [True] * count:
            assert process.poll() is None
            time.sleep(0.05)

    with started(words, tmp_path / "a", FAULT="slow 0 0") as first:
        wait_for_ranks(1, first)
        with started(words, tmp_path / "b", FAULT="slow 0 0") as second:
            wait_for_ranks(2, first)
            kill(second)
        wait_for_ranks(1, first)
        with started(words, tmp_path / "c", FAULT="slow 0 0") as third:
            wait_for_ranks(2, first)
            third.send_signal(signal.SIGTERM)
            assert third.wait(timeout=100) == 75
        (folder / "hurry").touch()
        assert first.wait(timeout=300) == 0
    told = (tmp_path / "a").read_text()
    assert told.count("another node joined: the ranks save and restart with it") == 2
    assert told.count("another node stopped the ranks before the last step; continuing") == 1
    assert told.count("restart 1 of 3") >= 1
    found, expected = losses(folder), undisturbed(tmp_path / "whole", steps)
    assert list(found) == list(range(1, 301))
    assert found == pytest.approx(expected, rel=1e-5)


def refused(capsys, words):
    """What the launcher says of a recipe before it starts anything."""
    assert main(["train", *words.split(), "--training.steps=500"]) == 2
    return capsys.readouterr().err.splitlines()


def test_recipe_is_checked_for_every_number_of_ranks(capsys):
    several = "--rdzv-endpoint=localhost:1 --nnodes"
    enabled = "--training.local_batch_size=2"
    assert refused(capsys, f"--processes=2 {several}=1:3 --training.local_batch_size=2") == [
        "error: defaults: training.global_batch_size: got -1; it would change with the number of "
        "ranks",
        "  use 24, which fits all from 2 to 6",
    ]
    batch = f"{enabled} --training.global_batch_size=8"
    assert refused(capsys, f"--processes=1 {several}=1:3 {batch} --training.seq_len=0") == [
        "error: --training.seq_len: got 0",
        "  wanted an integer >= 1",
        "error: --training.global_batch_size: got 8; it does not fit 3 ranks",
        "  use 12, which fits all from 1 to 3",
    ]
    layout = "--parallelism.tensor_parallel_degree=2"
    assert refused(capsys, f"--processes=1 {several}=1:4 {batch} {layout}") == [
        "error: --parallelism.tensor_parallel_degree: got 2; on 1 rank: this layout needs a "
        "multiple of 2 ranks (tensor_parallel_degree 2), not 1",
        "error: --parallelism.tensor_parallel_degree: got 2; on 3 ranks: this layout needs a "
        "multiple of 2 ranks (tensor_parallel_degree 2), not 3",
    ]


@pytest.mark.parametrize(("flag", "told"), table(__file__, "not_restarted.txt"))
def test_restarts_that_could_not_go_on_are_refused(flag, told, tmp_path, capsys):
    words = f"--processes=2 --max-restarts=1 {ROOT / RECIPE} --job.dump_folder={tmp_path} {flag}"
    assert "\n".join(refused(capsys, words)).endswith(
        told.format("a restart continues from the newest checkpoint")
    )


OUT_OF_REACH = "the rendezvous at a:1 cannot be reached: Connection refused"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RendezvousClosedError(), "another node ended the run; see its output"),
        (
            RendezvousTimeoutError(),
            "too few nodes joined the rendezvous at a:1 within 3 minutes (--rejoin-minutes)",
        ),
        (
            RendezvousConnectionError(OUT_OF_REACH),
            f"gave up after 3 minutes (--rejoin-minutes): {OUT_OF_REACH}. The node of --rdzv-end",
        ),
    ],
)
def test_nodes_that_do_not_meet_say_what_can_be_done(error, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "LaunchedRun", Mock(side_effect=error))
    words = ["--processes=1", "--nnodes=2", "--rdzv-endpoint=a:1", "--rdzv-conf=join_timeout=180"]
    assert main(["train", *words, str(ROOT / RECIPE), f"--job.dump_folder={tmp_path}"]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("saved", "status"), [(10, 1), (10_000, 0)])
def test_node_that_comes_back_after_the_end(saved, status, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher.Agent, "work", Mock(side_effect=RendezvousClosedError))
    monkeypatch.setattr(launcher, "saved_steps", lambda folder: [saved])
    words = ["--processes=1", "--nnodes=2", "--rdzv-endpoint=a:1", str(ROOT / RECIPE)]
    words += [f"--job.dump_folder={tmp_path}", "--training.steps=10000"]
    assert main(["train", *words]) == status


# Asks a store that is frozen, and exits while the answer comes after all.
LATE_ANSWER = """
import os, signal, subprocess, sys
from tests.ranks import freeze
from torchtitan.cluster import launcher
from torchtitan.cluster import rendezvous

port, pid = map(int, sys.argv[1:])
rendezvous.CALL_TIMEOUT = 0.5
store = rendezvous.Store("127.0.0.2", port, is_host=False)
store.set("key", "value")
freeze(pid)
try:
    store.get("key")
except rendezvous.RendezvousConnectionError:
    subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -CONT {pid}"])
    launcher.leave(7)
"""


def asks(port):
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        held = rendezvous.Store("127.0.0.2", port)
        held.check(["key"])
    dist.barrier()
    if dist.get_rank() == 1:
        words = [sys.executable, "-c", LATE_ANSWER, str(port), str(pids[0])]
        assert subprocess.run(words, cwd=ROOT, timeout=100).returncode == 7
    dist.barrier()


@pytest.mark.gate
def test_launcher_ends_well_while_a_late_answer_comes():
    port = free_port()
    run_ranks(asks, 2, port)
