"""Where the time of a trace went: exact numbers of traces written by hand, and a real one."""

import json

import pytest

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import train
from torchtitan.config import ConfigError
from torchtitan.tools.profile import Operator, Share, intersect, length, read_trace, subtract, union

MAIN, WORKER = 1, 2
ARGUMENTS = "ncclDevKernelArgsStorage<4096ul>"


def event(name, begin, end, category="cpu_op", thread=MAIN):
    """As torch writes it, in milliseconds here."""
    when = {"ts": 1000 * begin, "dur": 1000 * (end - begin)}
    return {"ph": "X", "name": name, "cat": category, "tid": thread, **when}


def read(folder, *events):
    path = folder / "rank0_trace.json"
    rest = {"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "tid": 0, "args": {}}
    path.write_text(json.dumps({"traceEvents": [rest, *events]}))
    return read_trace(path)


def step(number, begin, end):
    return event(f"ProfilerStep#{number}", begin, end, "user_annotation")


def test_intervals():
    these = union([(5, 7), (0, 2), (1, 3), (4, 4), (7, 8)])
    assert these == [(0, 3), (5, 8)]
    assert subtract(these, [(1, 2), (2, 6)]) == [(0, 1), (6, 8)]
    assert subtract(these, []) == these
    assert subtract([], these) == []
    assert intersect(these, [(2, 6), (7, 20)]) == [(2, 3), (5, 6), (7, 8)]
    assert length(these) == 6


def test_a_trace_of_gloo(tmp_path):
    trace = read(
        tmp_path,
        step(3, 0, 50),
        step(4, 50, 100),
        event("aten::linear", 10, 30),
        event("aten::mm", 12, 28),
        # A collective is asked for in no time, and carried out beside.
        event("c10d::_allgather_base_", 30, 31),
        event("gloo:all_gather", 25, 45, "user_annotation", WORKER),
        event("aten::copy_", 26, 44, "cpu_op", WORKER),  # gloo's own
        # An operator on a DTensor waits for what it started.
        event("aten::add", 60, 80),
        event("_c10d_functional::wait_tensor", 62, 75),
        event("gloo:all_reduce", 61, 75, "user_annotation", WORKER),
    )
    assert trace.steps == 2
    assert trace.span == pytest.approx(0.100)
    assert trace.compute == pytest.approx(0.020 + 0.002 + 0.005)
    assert trace.communication == pytest.approx(0.020 + 0.014)
    assert trace.exposed == pytest.approx(0.015 + 0.013)
    assert trace.idle == pytest.approx(0.100 - 0.027 - 0.028)
    assert trace.operators[:3] == (
        Operator("aten::mm", pytest.approx(0.016), 1),
        Operator("_c10d_functional::wait_tensor", pytest.approx(0.013), 1),
        Operator("aten::add", pytest.approx(0.007), 1),
    )
    assert trace.phases == {}


def test_a_trace_of_nccl(tmp_path):
    trace = read(
        tmp_path,
        step(1, 0, 10),
        event("aten::mm", 0, 9),  # the host only starts it
        event("ampere_sgemm", 5, 15, "kernel", 7),
        event("Memset (Device)", 15, 16, "gpu_memset", 7),
        event("Memcpy DtoH (Device -> Pinned)", 16, 19, "gpu_memcpy", 7),
        event(f"ncclDevKernel_AllGather_RING_LL({ARGUMENTS})", 10, 18, "kernel", 20),
        event("Memcpy PtoP (Device -> Device)", 18, 20, "gpu_memcpy", 20),
    )
    assert trace.steps == 1
    # The device goes on when the host is done.
    assert trace.span == pytest.approx(0.020)
    assert trace.compute == pytest.approx(0.011)
    assert trace.communication == pytest.approx(0.010)
    assert trace.exposed == pytest.approx(0.004)
    assert trace.idle == pytest.approx(0.005)
    assert trace.operators[0] == Operator("ampere_sgemm", pytest.approx(0.010), 1)


def test_phases_are_told_apart_without_those_within_them(tmp_path):
    mark = "user_annotation"
    trace = read(
        tmp_path,
        step(1, 0, 100),
        event("phase: pipeline", 0, 60, mark),
        event("phase: forward", 10, 30, mark),
        event("phase: forward", 40, 50, mark),
        event("phase: optimizer", 60, 70, mark),
        event("aten::mm", 15, 45),
        event("gloo:recv", 45, 65, mark, WORKER),
    )
    assert trace.phases == {
        "pipeline": Share(*map(pytest.approx, (0.030, 0.010, 0.010))),
        "forward": Share(*map(pytest.approx, (0.030, 0.020, 0.005))),
        "optimizer": Share(*map(pytest.approx, (0.010, 0.0, 0.005))),
    }
    nothing = read(tmp_path)
    assert (nothing.steps, nothing.span, nothing.operators) == (0, 0, ())


def test_what_is_no_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"x\.json: No such file"):
        read_trace(tmp_path / "x.json")
    for text in ("", "{", "[]", '{"traceEvents": [{"ph": "X"}]}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ConfigError, match=r"x\.json: is no Chrome trace of torch\.profiler"):
            read_trace(tmp_path / "x.json")


@pytest.mark.gate
@pytest.mark.costs("two profiled ranks")
def test_a_real_trace_of_two_ranks(tmp_path):
    schedule = {"enable_profiling": True, "profile_freq": 3, "profiler_warmup": 1}
    job = tiny.job(tmp_path, training={"steps": 3}, profiling={**schedule, "profiler_active": 2})
    run_ranks(train, 2, job)
    for rank in range(2):
        trace = read_trace(tmp_path / f"profile_traces/iteration_3/rank{rank}_trace.json")
        assert trace.steps == 2
        assert 0 < trace.compute < trace.span
        assert 0 < trace.exposed <= trace.communication < trace.span
        assert trace.compute + trace.exposed + trace.idle == pytest.approx(trace.span)
        phases = {"data", "forward", "backward", "clip", "sync", "optimizer"}
        assert phases <= trace.phases.keys()
        assert trace.phases["forward"].compute > 0
        assert trace.phases["optimizer"].compute > 0
        # FSDP gathers in the forward, and scatters in the backward.
        assert trace.phases["forward"].exposed + trace.phases["backward"].exposed > 0
        assert sum(phase.exposed for phase in trace.phases.values()) <= trace.exposed * 1.001
        seconds = [operator.seconds for operator in trace.operators]
        assert seconds == sorted(seconds, reverse=True)
        assert len(seconds) == 10
