"""Traces and memory snapshots."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from torchtitan.device import Device
from torchtitan.profiling import Profiler, ProfilingConfig, check_profiling

TRACES = ProfilingConfig(
    enable_profiling=True, profile_freq=3, profiler_warmup=1, profiler_active=1
)


def train(config, folder, steps, rank=0):
    with Profiler(config, folder, rank, Device("cpu")) as profiler:
        for step in steps:
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step(step)


def fail_at_step(step, error, config, folder, rank=0):
    with Profiler(config, folder, rank, Device("cpu")) as profiler:
        for done in range(1, step):
            profiler.step(done)
        raise error


def written(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))


def test_nothing_is_written_when_all_is_off(tmp_path):
    train(ProfilingConfig(), tmp_path, range(1, 25))
    assert written(tmp_path) == []


def test_a_trace_every_profile_freq_steps(tmp_path):
    train(TRACES, tmp_path, range(1, 8), rank=2)
    assert written(tmp_path) == [
        "profile_traces/iteration_3/rank2_trace.json",
        "profile_traces/iteration_6/rank2_trace.json",
    ]
    trace = json.loads((tmp_path / "profile_traces/iteration_6/rank2_trace.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("aten::matmul") == 1


def test_traces_of_a_resumed_run_carry_its_step(tmp_path):
    train(TRACES, tmp_path, range(101, 105))
    assert written(tmp_path) == ["profile_traces/iteration_103/rank0_trace.json"]


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_stopping_does_not_replace_a_trace_by_an_empty_one(tmp_path):
    config = TRACES.model_copy(update={"profile_freq": 1, "profiler_warmup": 0})
    train(config, tmp_path, range(1, 3))
    trace = json.loads((tmp_path / "profile_traces/iteration_2/rank0_trace.json").read_text())
    assert "aten::matmul" in [event.get("name") for event in trace["traceEvents"]]


def test_an_error_passes_through(tmp_path):
    with pytest.raises(KeyError, match="lost"):
        fail_at_step(2, KeyError("lost"), TRACES, tmp_path)


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "profile_traces").write_text("in the way")
    with pytest.raises(NotADirectoryError):
        train(TRACES, tmp_path, range(1, 8))


@pytest.fixture
def allocator(monkeypatch):
    """Stands in for CUDA's allocator, which a CPU does not have; lists what it was told."""
    told = []

    def record(enabled="all", max_entries=None):
        told.append((enabled, max_entries) if enabled else enabled)

    def dump(filename):
        told.append("dump")
        Path(filename).write_bytes(b"snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return told


def test_memory_snapshots_every_profile_freq_steps(tmp_path, allocator):
    train(ProfilingConfig(enable_memory_snapshot=True, profile_freq=2), tmp_path, range(1, 6))
    assert written(tmp_path) == [
        "memory_snapshot/iteration_2/rank0_memory_snapshot.pickle",
        "memory_snapshot/iteration_4/rank0_memory_snapshot.pickle",
    ]
    assert allocator == [("all", 100_000), "dump", "dump", None]


def test_out_of_memory_leaves_a_snapshot_and_goes_on_to_the_caller(tmp_path, allocator):
    config = ProfilingConfig(enable_memory_snapshot=True)
    with pytest.raises(torch.OutOfMemoryError, match="too big"):
        fail_at_step(5, torch.OutOfMemoryError("too big"), config, tmp_path, rank=1)
    assert written(tmp_path) == [
        "memory_snapshot/iteration_5_out_of_memory/rank1_memory_snapshot.pickle"
    ]
    assert allocator == [("all", 100_000), "dump", None]


def test_other_errors_leave_no_snapshot(tmp_path, allocator):
    config = ProfilingConfig(enable_memory_snapshot=True)
    with pytest.raises(KeyError):
        fail_at_step(1, KeyError(), config, tmp_path)
    assert allocator == [("all", 100_000), None]


def test_check_accepts_the_defaults_and_all_on():
    assert check_profiling(ProfilingConfig(), "cpu") == []
    all_on = ProfilingConfig(enable_profiling=True, enable_memory_snapshot=True)
    assert check_profiling(all_on, "cuda") == []


def test_check_refuses_memory_snapshots_on_a_cpu():
    [(key, message)] = check_profiling(ProfilingConfig(enable_memory_snapshot=True), "cpu")
    assert key == "profiling.enable_memory_snapshot"
    assert message.startswith("torch keeps a history of allocations on CUDA only")


def test_check_refuses_a_cycle_too_short_for_its_trace():
    config = ProfilingConfig(enable_profiling=True, profile_freq=3)
    assert check_profiling(config, "cuda") == [
        (
            "profiling.profile_freq",
            "these are too few steps for profiler_warmup = 3 plus profiler_active = 1; "
            "use at least 4",
        )
    ]


def test_frequencies_are_positive():
    with pytest.raises(ValidationError):
        ProfilingConfig(profile_freq=0)
