"""The event log of each rank: how it started, what it sends, where its time goes."""

import errno
import json
import logging
from unittest.mock import Mock

import pytest

from tests import tiny
from tests.plan import recorded
from tests.ranks import run_ranks
from tests.runs import rows, train
from torchtitan.metrics import EventLog
from torchtitan.plan.messages import link_traffic
from torchtitan.timeline import PHASES
from torchtitan.tools.history import RunHistory

LAYOUTS = {
    "FSDP 2": ({}, "dp_shard"),
    "DDP 2": (
        {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
        "dp_replicate",
    ),
    "TP 2": ({"tensor_parallel_degree": 2}, "tp"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_tells_its_start_its_traffic_and_its_phases(name, tmp_path):
    degrees, axis = LAYOUTS[name]
    job = tiny.job(tmp_path, parallelism=degrees, training={"local_batch_size": 4, "steps": 4})
    run_ranks(train, 2, job)
    logs = RunHistory.open(tmp_path).rank_events
    assert list(logs) == [0, 1]
    for events in logs.values():
        kinds = [event["event"] for event in events]
        assert kinds == ["steps", "start", "steps", "traffic", "steps", "steps", "end"]
        start = events[1]
        assert start["before_first_step_s"] > 0
        assert start["first_step_s"] > 0
        assert start["compile_s"] == 0
        for event in events[2], events[4], events[5]:
            assert {"data", "forward", "backward", "clip", "sync", "optimizer"} <= set(
                event["wall"]
            )
            assert set(event["wall"]) <= {*PHASES, "report", "profiling"}
            assert event["busy"].keys() == event["wall"].keys()
        assert events[-1]["stopped_by"] is None
    # What was sent is what was planned, and the few numbers that all ranks agree on.
    planned = link_traffic(recorded.step(job, 2), 2)
    asked = sum(one.bytes for one in planned if one.axis == axis)
    sent = logs[0][3][f"sent/{axis}"]
    assert asked > 100_000
    assert asked <= sent <= asked + 500


def test_reports_name_the_slowest_rank(tmp_path):
    run_ranks(train, 2, tiny.job(tmp_path, training={"steps": 2}))
    for row in (row for row in rows(tmp_path) if "tps" in row):
        phases = sum(row[f"time/{name}"] for name in PHASES if f"time/{name}" in row)
        # The mean over ranks is no more than the worst, whose clock is read a moment before.
        assert 0 < phases <= row["step_time"] * 1.1
        assert row["slowest/forward"] in (0, 1)
        assert row["slowest/forward_pct"] >= 0


def test_without_events_there_are_none(tmp_path):
    run_ranks(train, 1, tiny.job(tmp_path, training={"steps": 2}, metrics={"save_events": False}))
    assert not (tmp_path / "events").exists()


def test_a_disk_that_fails_ends_the_log_and_nothing_else(tmp_path, caplog, monkeypatch):
    log = EventLog(tmp_path / "events", 3)
    log.write(1, "start", seconds=2.5)

    assert log.file is not None
    log.file.close()
    full = OSError(errno.ENOSPC, "No space left on device")
    log.file = Mock(**{"write.side_effect": full})
    with caplog.at_level(logging.ERROR, "torchtitan"):
        log.write(2, "steps")
        log.write(3, "steps")
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/events/rank3.jsonl: No space left on device; no more events are written"
    ]
    (line,) = (tmp_path / "events/rank3.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["step"], event["event"], event["seconds"]) == (1, "start", 2.5)
    log.close()
