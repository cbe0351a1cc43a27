"""The rank that the others wait for is named, with the phase."""

import time

import torch.distributed as dist

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import running, train_from_scratch
from torchtitan.metrics.stragglers import Straggler, StragglerWatch, busy_seconds
from torchtitan.timeline import Spent
from torchtitan.tools.verify.measure import RowSink


def test_what_a_rank_costs_is_a_share_of_the_step():
    seconds = {"data": [0.1, 0.1, 0.4], "forward": [2.0, 1.0, 1.0]}
    assert StragglerWatch(10).slowest(seconds, 2.0) == [
        Straggler("data", 2, 0.30000000000000004, 15.000000000000002),
        Straggler("forward", 0, 1.0, 50.0),
    ]


def test_stages_of_a_pipeline_have_different_work():
    seconds = {"data": [0.1, 0.1, 0.1, 0.3], "forward": [1.0, 1.2, 3.0, 3.0]}
    found = [(late.phase, late.rank) for late in StragglerWatch(10, stages=2).slowest(seconds, 4.0)]
    assert found == [("data", 3), ("forward", 1)]
    # A rank that is alone in its stage has no other to be compared with.
    assert [late.phase for late in StragglerWatch(10, stages=4).slowest(seconds, 4.0)] == ["data"]


def test_waiting_for_data_is_the_ranks_own():
    assert busy_seconds("data", Spent(wall=2.0, busy=0.5)) == 2.0
    assert busy_seconds("forward", Spent(wall=2.0, busy=0.5)) == 0.5


def test_a_straggler_is_told_of_once_until_it_catches_up():
    watch = StragglerWatch(10)
    late, even = {"forward": [1.0, 1.5]}, {"forward": [1.0, 1.0]}
    reports = [late] * 5 + [even] + [late] * 3
    told = [len(watch.look(watch.slowest(seconds, 2.0))) for seconds in reports]
    assert told == [0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_another_rank_each_time_is_chance():
    watch = StragglerWatch(10)
    told = [watch.look(watch.slowest({"forward": [1.0, 1.5][::turn]}, 2.0)) for turn in (1, -1) * 4]
    assert not any(told)


def test_a_limit_of_none_tells_of_none():
    watch = StragglerWatch(0)
    assert not any(watch.look(watch.slowest({"forward": [1.0, 9.0]}, 2.0)) for _ in range(5))


class Clock:
    """A clock that moves only when told, so that the load of the machine is not in it."""

    now = 0.0

    def __call__(self):
        return self.now

    def work(self, batch):
        self.now += 10.0
        return batch


def with_slow_ranks(job):
    """Train, with rank 0 slow to read and rank 1 slow to compute; all rows, and those of steps."""
    recorder, steps, clock = RowSink(), [], Clock()
    observer = {
        "on_microbatch": lambda batch: clock.work(batch) if dist.get_rank() == 0 else batch,
        "after_step": lambda state: steps.append(recorder.last_step()),
    }
    with running(job, sinks=[recorder], **observer) as run:
        time.thread_time = run.timeline.clock = clock
        if dist.get_rank() == 1:
            run.model.parts[0].register_forward_pre_hook(lambda _, batch: clock.work(batch))
        train_from_scratch(run)
    return recorder.rows, steps


def test_slow_ranks_of_a_run_are_named_with_their_phases():
    job = tiny.job(training={"steps": 3}, metrics={"straggler_pct": 1.0})
    for rows, steps in run_ranks(with_slow_ranks, 2, job):
        found = [row for row in rows if row.get("event") == "straggler"]
        told = {(row["phase"], row["rank"]) for row in found}
        # What the others wait is not taken for work of theirs.
        assert told == {("data", 0), ("forward", 1)}
        assert all(row["percent"] > 1 for row in found)
        # Such a row comes after that of its step, and is not taken for it.
        assert rows[-1] in found
        assert [row["step"] for row in steps] == [1, 2, 3]
        assert all("grad_norm" in row for row in steps)
