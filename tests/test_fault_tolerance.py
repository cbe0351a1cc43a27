"""Replica groups by torchft: they train one run, lose a group, go on, and take it in again."""

import json
import pickle
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.layouts import OPTIMIZERS
from tests.ranks import free_port, run_ranks
from tests.runs import rows, trace
from tests.test_launch import PIPED, RECIPE, ROOT, environment
from tests.token_shards import build_stream
from tests.training.test_replicas import Evil
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.checks import load_job
from torchtitan.data import load_tokenizer
from torchtitan.resilience.replica_groups.group import transport

pytest.importorskip("torchft", reason='needs torchft: pip install "torchft>=0.2,<0.3"')
RECIPE_OF_ALL = [
    *("--model.name=tiny", "--model.flavor=tiny", "--training.mixed_precision_param=float32"),
    *("--training.local_batch_size=2", "--training.global_batch_size=8", "--training.seq_len=32"),
    *("--training.gc_freq=2", "--activation_checkpoint.mode=none", "--metrics.log_freq=1"),
    *("--lr_scheduler.warmup_steps=2", "--no-data.report_unigram_loss", "--no-validation.enable"),
    *("--checkpoint.enable", "--checkpoint.interval=1000"),
]
OF_GROUPS = ["--fault_tolerance.enable", "--fault_tolerance.group_size=2"]
FLAGS = ["--job.imports=tests.tiny,tests.meeting", *RECIPE_OF_ALL, *OF_GROUPS]


@pytest.fixture
def lighthouse(monkeypatch):
    """A lighthouse on a free port, to which a group is gone after a second of silence."""
    port = free_port()
    words = [f"--bind=[::]:{port}", "--min_replicas=1", "--heartbeat_timeout_ms=1000"]
    script = Path(sys.executable).parent / "torchft_lighthouse"
    process = subprocess.Popen([script, *words], env=environment(RUST_LOG="warn"))
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://localhost:{port}")
    yield
    process.terminate()
    process.wait()


def groups(folder, ranks, *flags, **variables):
    """Train with two groups of so many ranks, started again once if they die; their output."""
    (folder / "meeting").mkdir(parents=True)
    words = [sys.executable, "-m", "torchtitan.launch", f"--processes={ranks}", "--max-restarts=1"]
    words += [f"--job.config_file={RECIPE}", *FLAGS, *flags]
    of = {"cwd": ROOT, "env": environment(MEETING=str(folder / "meeting"), **variables), **PIPED}
    started = []
    for group in range(2):
        own = [f"--fault_tolerance.replica_id={group}", f"--job.dump_folder={folder / str(group)}"]
        started.append(subprocess.Popen([*words, *own], **of))
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], "\n\n".join(outputs)
    finally:
        for process in started:
            process.terminate()
            process.communicate()
    return outputs


def saved(folder, step):
    """The tensors of a checkpoint, and what else it says."""
    path = folder / f"checkpoint/step-{step}"
    source = SavedTensors(path)
    tensors = {name: source.read(name) for name in source.shapes() if name[:4] != "rng."}
    return tensors, json.loads((path / "train_state.json").read_text())


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.usefixtures("lighthouse")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_groups_train_the_run_of_ddp(name, tmp_path):
    optimizer = {"name": name, **OPTIMIZERS[name]}
    words = [f"--optimizer.{key}={value}" for key, value in optimizer.items()]
    words.append("--training.steps=5")
    outputs = groups(tmp_path, 1, *words, "--fault_tolerance.min_replica_size=2")
    assert not any("is discarded" in output for output in outputs)
    first, second = (saved(tmp_path / str(group), 5) for group in range(2))
    assert_equal(first[0], second[0])
    assert first[1]["train_state"] == second[1]["train_state"]
    assert first[1]["data"] == second[1]["data"]

    words.append("--parallelism.data_parallel_replicate_degree=2")
    job = load_job(ROOT / RECIPE, [*RECIPE_OF_ALL, *words], 2, "cpu").config
    expected = run_ranks(trace, 2, job, True)[0]
    found = {row["step"]: row for row in rows(tmp_path / "0") if "loss" in row}
    assert [found[n]["loss"] for n in range(1, 6)] == pytest.approx(expected.losses, rel=1e-5)
    norms = [found[n]["grad_norm"] for n in range(1, 6)]
    assert norms == pytest.approx(expected.grad_norms, rel=1e-4)
    for weight, part in expected.weights[-1].items():
        off = (first[0][f"model.{weight}"] - part.local).abs().max().item()
        assert off <= 1e-5, f"{weight} is off by {off}"


@pytest.mark.slow
@pytest.mark.usefixtures("lighthouse")
@pytest.mark.parametrize(("ranks", "dies"), [(1, 0), (2, 1)])
def test_a_group_dies_and_comes_back(ranks, dies, tmp_path):
    steps, stays = 40, 1 - dies
    outputs = groups(tmp_path, ranks, f"--training.steps={steps}", FAULT=f"kill {dies} 3")
    assert "a step of 2 replica groups is discarded and repeated" in outputs[stays]
    assert "restart 1 of 1" in outputs[dies]
    back = re.search(r"loaded the state .* group: step (\d+), was 0", outputs[dies])
    assert back
    first, second = (saved(tmp_path / str(group), steps) for group in range(2))
    assert_equal(first[0], second[0])
    assert first[1]["train_state"] == second[1]["train_state"]
    assert first[1]["data"] == second[1]["data"]

    events = [row for row in rows(tmp_path / str(stays)) if row.get("event") == "groups"]
    assert [row["groups"] for row in events] == [2, 1, 2]
    assert [row["step"] for row in events][:2] == [0, 2]
    returned = events[2]["step"]
    assert 6 <= returned < steps
    assert int(back[1]) == returned

    # The lanes of the group that was away stood still; nothing was left out or read twice.
    times = {stays: steps, dies: 2 + steps - returned}
    served = {lane: times[lane // 4] for lane in range(8)}
    assert dict(enumerate(first[1]["data"]["lanes"])) == positions(served)


def positions(samples):
    """Where each lane stands after so many samples of it."""
    job = load_job(ROOT / RECIPE, ["--training.seq_len=32"], 1, "cpu").config
    part = {"seed": job.debug.seed, "seq_len": 32, "local_batch_size": 8}
    stream = build_stream(job.data, load_tokenizer(None), **part)
    found = {}
    for number in range(1, max(samples.values()) + 1):
        next(stream)
        lanes = stream.state_dict()["lanes"]
        found |= {lane: lanes[str(lane)] for lane, count in samples.items() if count == number}
    stream.close()
    return found


def fetch():
    from torchft.checkpointing import HTTPTransport

    patience = timedelta(seconds=60)
    server, ours = HTTPTransport(timeout=patience, num_chunks=0), transport(patience)
    server.send_checkpoint([1], 3, {"a": torch.arange(5), "b": [1, None]}, patience)
    found = ours.recv_checkpoint(0, server.metadata(), 3, patience)
    assert torch.equal(found["a"], torch.arange(5))
    assert found["b"] == [1, None]
    server.send_checkpoint([1], 3, {"a": Evil()}, patience)
    with pytest.raises(pickle.UnpicklingError, match="abort"):
        ours.recv_checkpoint(0, server.metadata(), 3, patience)


def test_what_a_group_fetches_is_tensors_and_plain_values():
    run_ranks(fetch, 1)  # a process of its own, as torchft leaves its sockets open
