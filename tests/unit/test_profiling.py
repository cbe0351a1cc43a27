"""Traces and memory snapshots."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.tiny import named
from torchtitan.device import Device
from torchtitan.optim import AdamW, Optimizers
from torchtitan.profiling import REQUEST_FILE, Evidence, Profiler, ProfilingConfig
from torchtitan.timeline import Timeline

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
        "memory_snapshot/iteration_5_out_of_memory/rank1_memory_snapshot.pickle",
        "out_of_memory/rank1.json",
    ]
    assert allocator == [("all", 100_000), "dump", None]


def test_other_errors_leave_neither_a_snapshot_nor_evidence(tmp_path, allocator):
    config = ProfilingConfig(enable_memory_snapshot=True)
    with pytest.raises(RuntimeError, match="lost"):
        fail_at_step(1, RuntimeError("lost"), config, tmp_path)
    assert allocator == [("all", 100_000), None]
    assert written(tmp_path) == []


class Asked:
    """A run of one rank, which sees the time that the test says."""

    def __init__(self, folder, config=None, rank=0, ranks=1):
        self.folder, self.now, self.ranks, self.copies = folder, 100.0, ranks, []
        self.profiler = Profiler(
            config or ProfilingConfig(),
            folder,
            rank,
            Device("cpu"),
            clock=lambda: self.now,
            at_request=lambda: self.copies.append(self.now),
        )

    def request(self, text='{"steps": 2}'):
        (self.folder / REQUEST_FILE).write_text(text)

    def step(self, step, seconds=10.0):
        self.now += seconds
        torch.ones(8, 8) @ torch.ones(8, 8)
        self.profiler.agree_on_signals(self.ranks * self.profiler.is_signaled())
        self.profiler.agree(self.profiler.request())
        self.profiler.step(step)


def test_a_running_job_traces_when_asked_by_a_file(tmp_path):
    run = Asked(tmp_path)
    with run.profiler:
        run.step(1)
        run.request()
        for step in range(2, 8):
            run.step(step)
        assert written(tmp_path) == ["profile_traces/iteration_5_on_request/rank0_trace.json"]
        run.request('{"steps": 1}')
        for step in range(8, 12):
            run.step(step)
    assert len(written(tmp_path)) == len(run.copies) == 2
    path = tmp_path / "profile_traces/iteration_5_on_request/rank0_trace.json"
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::matmul") == 2


def test_the_file_is_looked_for_once_a_second_and_by_rank_0(tmp_path):
    run, other = Asked(tmp_path), Asked(tmp_path, rank=1)
    with run.profiler, other.profiler:
        assert run.profiler.request() == 0
        run.request()
        run.now += 0.9
        assert run.profiler.request() == other.profiler.request() == 0
        run.now += 0.2
        assert run.profiler.request() == 2
        assert not (tmp_path / REQUEST_FILE).exists()
        # Until all ranks know of it.
        assert run.profiler.request() == 2
        run.profiler.agree(2)
        assert run.profiler.request() == 0


def test_a_request_of_an_earlier_run_is_forgotten(tmp_path):
    Asked(tmp_path).request()
    run = Asked(tmp_path)
    with run.profiler:
        assert run.profiler.request() == 0


def test_a_request_before_the_first_step_is_kept(tmp_path):
    run = Asked(tmp_path)
    run.request()
    with run.profiler:
        assert run.profiler.request() == 2


@pytest.mark.parametrize("text", ["", "[]", '{"step": 1}', '{"steps": "x"}', '{"steps": -1}'])
def test_a_request_that_makes_no_sense_traces_nothing(text, tmp_path):
    run = Asked(tmp_path)
    with run.profiler:
        run.request(text)
        assert run.profiler.request() == 0
    assert written(tmp_path) == []


def test_a_signal_asks_for_a_step(tmp_path):
    before = signal.getsignal(signal.SIGPROF)
    run = Asked(tmp_path, rank=3, ranks=8)  # all of which get it
    with run.profiler:
        os.kill(os.getpid(), signal.SIGPROF)
        for step in range(1, 5):
            run.step(step)
    assert written(tmp_path) == ["profile_traces/iteration_3_on_request/rank3_trace.json"]
    assert signal.getsignal(signal.SIGPROF) == before


def test_who_asks_during_a_trace_has_to_wait_for_its_end(tmp_path):
    run = Asked(tmp_path, TRACES)
    with run.profiler:
        run.step(1)  # after it, the trace of step 3 begins
        run.request()
        for step in range(2, 7):
            run.step(step)
    assert written(tmp_path) == [
        "profile_traces/iteration_3/rank0_trace.json",
        "profile_traces/iteration_6_on_request/rank0_trace.json",
    ]


def test_a_run_that_ends_writes_the_steps_that_it_traced(tmp_path):
    run = Asked(tmp_path)
    with run.profiler:
        run.request('{"steps": 9}')
        for step in range(1, 5):
            run.step(step)
    assert written(tmp_path) == ["profile_traces/iteration_4_on_request/rank0_trace.json"]


def test_a_profiler_at_work_marks_the_phases(tmp_path):
    timeline = Timeline(Device("cpu"))
    with Profiler(TRACES, tmp_path, 0, Device("cpu"), timeline) as profiler:
        for step in range(1, 4):
            with timeline.phase("forward"):
                torch.ones(8, 8)
            profiler.step(step)
        assert not timeline.is_traced
    trace = json.loads((tmp_path / "profile_traces/iteration_3/rank0_trace.json").read_text())
    assert [event.get("name") for event in trace["traceEvents"]].count("phase: forward") == 1


NO_MEMORY = [
    torch.OutOfMemoryError("too big"),
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to ..."),
]


def fail_in_backward(profiler, timeline, error):
    with profiler:
        profiler.step(4)
        with timeline.phase("pipeline"), timeline.phase("backward"):
            raise error


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_when_memory_runs_out_what_was_held_is_written_and_the_error_goes_on(error, tmp_path):
    model = torch.nn.ModuleDict({"small": torch.nn.Linear(4, 4), "large": torch.nn.Linear(64, 64)})
    optimizers = Optimizers(named(model), AdamW())
    model["large"](torch.ones(64)).sum().backward()
    optimizers.step()
    timeline = Timeline(Device("cpu"))
    recipe = {"training.local_batch_size": 8, "job.x": 1}
    evidence = Evidence(Device("cpu"), timeline, optimizers, recipe)
    profiler = Profiler(ProfilingConfig(), tmp_path, 2, Device("cpu"), timeline, evidence)
    with pytest.raises(type(error)) as raised:
        fail_in_backward(profiler, timeline, error)
    assert raised.value is error
    found = json.loads((tmp_path / "out_of_memory/rank2.json").read_text())
    assert (found["step"], found["phase"], found["rank"]) == (5, "backward", 2)
    large, small = 4 * (64 * 64 + 64), 4 * (4 * 4 + 4)
    assert found["held_bytes"]["parameters"] == {"float32": large + small}
    assert found["held_bytes"]["gradients"] == {"float32": large}
    # Two moments, and a count of steps for each parameter.
    assert found["held_bytes"]["optimizer"] == {"float32": 2 * large + 2 * 4}
    first = found["largest_modules"][0]
    sizes = {"parameters": large, "gradients": large, "optimizer": 2 * large + 2 * 4}
    assert first == {"module": "large", "bytes": 4 * large + 2 * 4, **sizes}
    assert found["peak_gib"] > 0
    assert found["to_shrink_it"].keys() == {"training.local_batch_size"}
    assert found["to_shrink_it"]["training.local_batch_size"]["now"] == 8


def test_evidence_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    (tmp_path / "out_of_memory").write_text("in the way")
    with pytest.raises(MemoryError):
        fail_at_step(1, MemoryError(), ProfilingConfig(), tmp_path)


class Stub:
    """Stands in for a trace of CUDA, which this machine may not have."""

    def __init__(self, device, warmup, active, name):
        self.name, self.left = name, warmup + active

    def step(self):
        self.left -= 1
        return self.left == 0

    def write(self, path):
        pass


def test_a_trace_on_cuda_comes_with_a_memory_snapshot(tmp_path, allocator, monkeypatch):
    monkeypatch.setattr("torchtitan.profiling.profiler.Trace", Stub)
    timeline = Timeline(Device("cpu"))
    profiler = Profiler(ProfilingConfig(), tmp_path, 0, Device("cuda"), timeline)
    with profiler:
        profiler.agree(1)
        for step in range(1, 5):
            profiler.step(step)
    [snapshot] = written(tmp_path)
    assert snapshot == "memory_snapshot/iteration_3_on_request/rank0_memory_snapshot.pickle"
    assert allocator == [("all", 100_000), "dump", None]
