"""Traces made by hand, as NCCL and gloo leave them, and what is said of them."""

import json
import os
import pickle

import pytest

from tests.tables import data
from torchtitan.config import ConfigError
from torchtitan.flight_recorder import read_traces, report
from torchtitan.flight_recorder.records import load, name_ranks
from torchtitan.flight_recorder.traces import read_crash

TP = {"name": "7", "desc": "mesh_tp", "ranks": "[2, 3]"}
ALL = {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}


def record(group, number, operation="nccl:all_reduce", **changes):
    """What torch records of a collective of 5 float32; finished unless `changes` says otherwise."""
    own = {"record_id": number, "collective_seq_id": number, "profiling_name": operation}
    own |= {"process_group": (group["name"], group["desc"])}
    own |= {"time_created_ns": 1_700_000_000_000_000_000 + number}
    return data(__file__)["record"] | own | changes


def waiting(group, number, **changes):
    return record(group, number, state="scheduled", retired=False, **changes)


def leave(folder, rank, *records, error="", kind="collective", **step):
    """Write what a rank leaves: its step, its ring if it has one, and what it raised."""
    note = {"state": "training", "step": 7, "world_size": 4} | step
    (folder / f"{rank}.step").write_text(json.dumps(note).ljust(511) + "\n")
    if records:
        config = {group["name"]: group for group in (TP, ALL)}
        ring = {"version": "2.10", "pg_config": config, "entries": list(records)}
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(ring, protocol=2))
    if error:
        failure = {"time": 1.7e9, "error": error, "kind": kind, "place": "me.py:3 (f)"}
        failure["groups"] = {}
        (folder / f"{rank}.json").write_text(json.dumps(failure))


def test_healthy_run(tmp_path):
    for rank in range(4):
        leave(tmp_path, rank, state="finished", step=100)
    assert report(read_traces(tmp_path)) == ["ranks 0-3 finished at step 100"]


def test_rank_that_was_killed(tmp_path):
    for rank in (0, 1, 3):
        leave(tmp_path, rank, record(ALL, 1), waiting(ALL, 2), error="Connection closed by peer")
    leave(tmp_path, 2)
    assert report(read_traces(tmp_path)) == [
        "rank 2 was killed from outside at step 7 and left no message",
        "ranks 0, 1 and 3 waited at step 7 in all_reduce #2 on all (ranks 0-3) of float32 [5] for "
        "rank 2, called at torchtitan/parallel/world.py:12 (sum)",
        "likely cause: the system: it ran out of memory (see dmesg), the process was killed, or "
        "the machine failed",
    ]


def test_rank_that_stays_behind(tmp_path):
    """NCCL: nothing but rings. Rank 2 stands still; 3 waits for it in tp, 0 and 1 for both."""
    leave(tmp_path, 0, record(ALL, 1), waiting(ALL, 2))
    leave(tmp_path, 1, record(ALL, 1), waiting(ALL, 2))
    leave(tmp_path, 2, record(ALL, 1), record(TP, 41))
    leave(tmp_path, 3, record(ALL, 1), record(TP, 41), waiting(TP, 42), waiting(TP, 43))
    lines = report(read_traces(tmp_path))
    assert lines[0] == (
        "rank 2 hung at step 7 outside communication; its last collective, all_reduce #41 on tp "
        "(ranks 2 and 3), had finished"
    )
    assert "ranks 0 and 1 waited at step 7 in all_reduce #2 on all" in lines[1]
    assert "for ranks 2 and 3, called" in lines[1]
    assert lines[2].startswith("rank 3 waited at step 7 in all_reduce #42 on tp")
    assert "for rank 2, called" in lines[2]


def test_collective_that_holds_the_later_ones_is_named(tmp_path):
    """Gloo marks the one that failed as done, so another one under way looks like the oldest."""
    gloo = {"operation": "gloo:all_gather", "state": "scheduled"}
    ring = [record(TP, 41, **gloo), record(TP, 42, **gloo), waiting(TP, 43)]
    leave(tmp_path, 3, *ring, error="Timed out")
    leave(tmp_path, 2, record(TP, 41, **gloo))
    (line,) = (line for line in report(read_traces(tmp_path)) if line.startswith("rank 3"))
    assert "in all_gather #42 on tp" in line


@pytest.mark.parametrize(
    ("change", "called"),
    [
        ({"operation": "nccl:all_gather"}, "all_gather of float32 [5]"),
        ({"input_sizes": [[6]], "output_sizes": [[6]]}, "all_reduce of float32 [6]"),
        ({"input_dtypes": ["Half"], "output_dtypes": ["Half"]}, "all_reduce of float16 [5]"),
    ],
)
def test_ranks_that_call_different_things(change, called, tmp_path):
    for rank in (0, 1, 3):
        leave(tmp_path, rank, record(ALL, 1), waiting(ALL, 2))
    leave(tmp_path, 2, record(ALL, 1), waiting(ALL, 2, **change))
    first, *_, last = report(read_traces(tmp_path))
    assert first == (
        "#2 on all (ranks 0-3) differs at step 7: ranks 0, 1 and 3 all_reduce of float32 [5], "
        f"rank 2 {called}"
    )
    assert "different paths through the program" in last


def test_send_and_receive(tmp_path):
    p2p = {"is_p2p": True, "p2p_seq_id": 9, "operation": "nccl:recv 0<-1"}
    leave(tmp_path, 2, waiting(TP, 1, **p2p), world_size=0)
    leave(tmp_path, 3, record(TP, 1), world_size=0)
    lines = report(read_traces(tmp_path))
    assert "rank 2 waited at step 7 in recv 0<-1 #9 on tp (ranks 2 and 3)" in lines[1]
    assert "for rank 3, called" in lines[1]


def test_ranks_that_wait_for_each_other(tmp_path):
    leave(tmp_path, 2, waiting(TP, 1), record(ALL, 1), world_size=0)
    leave(tmp_path, 3, waiting(ALL, 2), record(ALL, 1), world_size=0)
    *_, last = report(read_traces(tmp_path))
    assert last.startswith("likely cause: the ranks waited for each other")


def p2p(operation):
    return waiting(TP, 1, is_p2p=True, p2p_seq_id=9, operation=f"nccl:{operation}")


# What each of the ranks 2 and 3 waits in, and whether nothing but the network can be the cause.
PAIRS = {
    "the same collective": (waiting(TP, 2), waiting(TP, 2), True),
    "data of one that the other has finished": (waiting(TP, 3), waiting(TP, 2), True),
    "send and receive": (p2p("send 0->1"), p2p("recv 1<-0"), True),
    "two receives": (p2p("recv 0<-1"), p2p("recv 1<-0"), False),
    "a collective and a receive": (waiting(TP, 2), p2p("recv 1<-0"), False),
    "other operations": (waiting(TP, 2), waiting(TP, 2, operation="nccl:broadcast"), False),
    "other groups": (waiting(TP, 2), waiting(ALL, 2), False),
}


@pytest.mark.parametrize("case", PAIRS)
def test_network_that_is_gone(case, tmp_path):
    one, other, is_network = PAIRS[case]
    leave(tmp_path, 2, record(TP, 1), one, world_size=0)
    leave(tmp_path, 3, record(TP, 1), other, world_size=0)
    *first, last = report(read_traces(tmp_path))
    assert ("the network between these ranks failed, or one of them froze" in last) == is_network
    assert len(first) == len(set(first))


def test_network_is_gone_where_one_of_several_groups_waits(tmp_path):
    """Ranks 2 and 3 are cut off from each other; the others wait for them elsewhere."""
    for rank in (0, 1):
        leave(tmp_path, rank, waiting(ALL, 1))
    for rank in (2, 3):
        leave(tmp_path, rank, waiting(TP, 1))
    lines = report(read_traces(tmp_path))
    assert "the network between these ranks failed" in lines[-1]
    assert len(lines) == 3


def test_rank_that_raised_is_told_before_those_that_it_took_along(tmp_path):
    leave(tmp_path, 0, waiting(ALL, 1), error="Connection closed by peer")
    leave(tmp_path, 1, error="ValueError: no", kind="other")
    leave(tmp_path, 3, error="Terminated: 143", kind="terminated")
    assert report(read_traces(tmp_path)) == [
        "rank 1 raised ValueError: no at step 7, in me.py:3 (f)",
        "rank 2 left no traces: never started, or wrote to another disk",
        "rank 0 waited at step 7 in all_reduce #1 on all (ranks 0-3) of float32 [5] for ranks 1-3, "
        "called at torchtitan/parallel/world.py:12 (sum)",
        "rank 3 was terminated at step 7, in me.py:3 (f)",
        "likely cause: the error above; when one rank fails, the others end too",
    ]


def test_rank_that_crashed(tmp_path):
    leave(tmp_path, 0, state="starting", step=0, world_size=1)
    (tmp_path / "0.stack").write_text(
        "Fatal Python error: Aborted\n\n"
        "Thread 0x1 (most recent call first):\n"
        '  File "/lib/python/threading.py", line 324 in wait\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "/venv/torch/distributed/distributed_c10d.py", line 7 in all_reduce\n'
        '  File "/home/me/torchtitan/parallel/world.py", line 12 in sum\n'
    )
    first, _ = report(read_traces(tmp_path))
    assert first == (
        "rank 0 crashed before its first step: Aborted at torchtitan/parallel/world.py:12 (sum)"
    )
    assert read_crash("") == ""


def test_trace_that_is_cut_off_is_left_out(tmp_path):
    leave(tmp_path, 0, record(ALL, 1), world_size=1)
    whole = (tmp_path / "rank_0").read_bytes()
    (tmp_path / "rank_0").write_bytes(whole[: len(whole) // 2])
    (trace,) = read_traces(tmp_path)
    assert (trace.fate, trace.collectives) == ("lost", [])


def test_verb(tmp_path, says):
    leave(tmp_path, 0, state="finished", world_size=1)
    assert says("trace", tmp_path) == "rank 0 finished at step 7\n"


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_folder_without_traces_is_refused(name, tmp_path, says):
    assert str(tmp_path) in says("trace", tmp_path / name, status=2)


class Malice:
    """Would run a command in whoever reads it."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_nothing_in_a_trace_is_executed(tmp_path, says):
    leave(tmp_path, 0, record(ALL, 1, frames=Malice(tmp_path / "mark")))
    assert "rank_0: refused: it refers to posix.system" in says("trace", tmp_path, status=2)
    assert not (tmp_path / "mark").exists()


def test_other_pickles_are_refused():
    with pytest.raises(ConfigError, match=r"x: not a trace"):
        load(pickle.dumps([1]), "x")


def test_ranks_in_words():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([1, 0]) == "ranks 0 and 1"
    assert name_ranks([0, 1, 2, 5, 7, 8, 9, 10]) == "ranks 0-2, 5 and 7-10"
