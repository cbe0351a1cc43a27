"""A run that was not configured for it writes a trace when asked: all ranks of the same steps."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import running, train_from_scratch
from torchtitan import trainer
from torchtitan.tools import cli
from torchtitan.tools.profile import read_trace

ROOT = Path(__file__).resolve().parents[2]


def asked_by_signal(job):
    """Train; rank 1 alone gets a signal in the middle of step 2."""

    def ask(step):
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGPROF)

    with running(job, before_step=ask) as run:
        train_from_scratch(run)


def test_a_signal_to_one_rank_has_all_trace_the_same_step(tmp_path):
    run_ranks(asked_by_signal, 2, tiny.job(tmp_path, training={"steps": 6}))
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*_trace.json"))
    # Step 3 warms the profiler up.
    folder = "profile_traces/iteration_4_on_request"
    assert found == [f"{folder}/rank{rank}_trace.json" for rank in range(2)]
    assert [read_trace(tmp_path / name).steps for name in found] == [1, 1]


@pytest.mark.gate
def test_a_run_answers_torchtitan_profile(tmp_path, capfd):
    recipe = str(ROOT / "train_configs/debug_model.toml")
    small = ["--training.seq_len", "32", "--training.global_batch_size", "8"]
    quiet = ["--no-checkpoint.enable", "--no-validation.enable", "--no-data.report_unigram_loss"]
    words = [recipe, "--job.dump_folder", str(tmp_path / "run"), *small, *quiet]
    context = multiprocessing.get_context("fork")
    run = context.Process(target=trainer.main, args=([*words, "--training.steps", "100000"],))
    run.start()
    try:
        while not (tmp_path / "run/metrics.jsonl").exists() and run.is_alive():
            time.sleep(0.1)
        assert cli.main(["profile", str(tmp_path / "run"), "--steps", "2", "--wait", "300"]) == 0
    finally:
        assert run.pid is not None
        os.kill(run.pid, signal.SIGINT)
        run.join()
    output = capfd.readouterr().out
    assert "1 of 1 ranks wrote their traces" in output
    assert "of 2 steps" in output
    assert "rank 0    computes" in output
    [trace] = (tmp_path / "run/profile_traces").glob("*_on_request/rank0_trace.json")
    assert read_trace(trace).steps == 2
