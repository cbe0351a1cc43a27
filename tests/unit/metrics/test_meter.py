"""The meter: what a row holds, when one is due, and how it ends."""

import logging
import math
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests import tiny
from torchtitan.build import Run
from torchtitan.device import Device
from torchtitan.metrics import Meter
from torchtitan.models.settings import TextConfig
from torchtitan.parallel import Degrees
from torchtitan.provenance import sink_context
from torchtitan.tasks.next_token import NextToken
from torchtitan.timeline import Timeline


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self):
        self.started, self.rows, self.summary = None, [], None

    def open(self, start_step):
        self.started = start_step

    def write(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def close(self, summary):
        assert self.summary is None, "closed twice"
        self.summary = dict(summary)


class Clock:
    """A clock that stands still unless told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make(**changes):
    kept, clock = Kept(), Clock()
    given = {"log_freq": 10, "total_steps": 100, "units_per_step": 1000, "flops_per_unit": 6e6}
    given |= {"peak_flops": 1e9, "devices": 2, "device": Device("cpu"), "clock": clock}
    return Meter([kept], **(given | changes)), kept, clock


def run(meter, clock, steps, seconds=1.0, tokens=1000):
    for step in steps:
        clock.now += seconds
        meter.record(loss=torch.tensor(10.0 / step), grad_norm=0.5, lr=1e-3, units=tokens)
        meter.flush(step)


def ran(steps, seconds=1.0, **changes):
    """What a sink is given of these steps."""
    meter, kept, clock = make(**changes)
    with meter:
        run(meter, clock, steps, seconds)
    return kept


def test_rows_are_due_on_the_first_step_every_log_freq_and_the_last():
    assert [step for step, _ in ran(range(1, 26), total_steps=25).rows] == [1, 10, 20, 25]


def test_the_first_step_of_a_resumed_process_is_due():
    kept = ran(range(13, 21), start_step=12, start_units=12_000)
    assert kept.started == 12
    assert [(step, row["tokens"]) for step, row in kept.rows] == [(13, 13_000), (20, 20_000)]


def test_resume_says_where_to_go_on():
    meter, kept, clock = make()
    meter.resume(40, 5_000)
    with meter:
        run(meter, clock, [41])
    assert kept.started == 40
    assert kept.rows[0][1]["tokens"] == 6_000


def test_the_first_row_is_timed_by_the_steps_that_really_passed():
    meter, kept, clock = make()
    with meter:
        run(meter, clock, [1], seconds=40.0)
        run(meter, clock, range(2, 11), seconds=2.0)
    (_, first), (_, second) = kept.rows
    assert first["step_time"] == 40.0
    assert first["tps"] == 1000 / 40 / 2
    # Nine steps lie between rows 1 and 10, not ten.
    assert second["step_time"] == pytest.approx(2.0)
    assert second["tps"] == pytest.approx(250.0)


def test_mfu_and_memory_are_shares_of_what_the_device_has():
    kept = ran([1], seconds=2.0)
    row = kept.rows[0][1]
    assert row["tps"] == 250.0
    assert row["memory_pct"] == pytest.approx(
        100 * row["memory_gib"] / Device("cpu").memory_capacity()
    )
    assert row["mfu"] == pytest.approx(250 * 6e6 / 1e9)
    assert ran([1], peak_flops=None).rows[0][1]["mfu"] is None


def test_devices_are_those_of_all_replica_groups():
    """Rows count the units of all groups, so their rate per device is that of all devices."""
    training = {"mixed_precision_param": "bfloat16"}
    job = tiny.job(fault_tolerance={"enable": True, "group_size": 3}, training=training)
    of = {"device": SimpleNamespace(peak_flops=str), "degrees": Degrees(dp_shard=2), "table": None}
    world = SimpleNamespace(rank=0, size=2, **of)
    run = SimpleNamespace(job=job, task=NextToken(TextConfig(), tiny.ARGS), world=world)
    run.timeline, run.has_hash = Timeline(Device("cpu")), False
    run.data, run.sinks = SimpleNamespace(take_shares=dict, report=dict), lambda context: []
    meter = Run.open_meter(run, sink_context(job, world))
    assert (meter.devices, meter.peak_flops) == (2 * 3, "torch.bfloat16")
    assert meter.units_per_step == 8 * 32


def test_tokens_and_skipped_add_up_between_rows():
    meter, kept, clock = make()
    with meter:
        for step in range(1, 11):
            clock.now += 1
            skipped = torch.tensor(step in (1, 3, 7))
            meter.record(loss=1.0, units=torch.tensor(2**24 + 1), skipped=skipped)
            meter.flush(step)
    (_, first), (_, second) = kept.rows
    assert (first["skipped"], second["skipped"]) == (1, 2)
    # A float32 cannot hold these.
    assert (first["tokens"], second["tokens"]) == (2**24 + 1, 10 * (2**24 + 1))
    assert kept.summary["skipped"] == 3


def test_loss_is_that_of_the_row_s_step():
    assert [row["loss"] for _, row in ran(range(1, 11)).rows] == [10.0, 1.0]


def test_a_value_not_recorded_again_is_not_repeated():
    meter, kept, clock = make(log_freq=1)
    with meter:
        meter.record(router_entropy=0.5)
        run(meter, clock, [1, 2])
    (_, first), (_, second) = kept.rows
    assert first["router_entropy"] == 0.5
    assert "router_entropy" not in second


def test_waiting_for_data_is_a_share_of_the_step():
    meter, kept, clock = make(log_freq=1)
    with meter:
        with meter.timeline.phase("data"):
            clock.now += 1.0
        run(meter, clock, [1], seconds=3.0)
        run(meter, clock, [2], seconds=3.0)
    assert kept.rows[0][1]["data_pct"] == 25.0
    assert kept.rows[0][1]["step_time"] == 4.0
    assert kept.rows[1][1]["data_pct"] == 0.0


def test_pauses_are_left_out_of_the_speed_and_reported_by_name():
    meter, kept, clock = make(log_freq=2)
    with meter:
        run(meter, clock, [1])
        with meter.timeline.pause("checkpoint"):
            clock.now += 5.0
        with meter.timeline.pause("validation"):
            clock.now += 7.0
            with meter.timeline.phase("data"):
                clock.now += 1.0
        run(meter, clock, [2])
        run(meter, clock, [3, 4])
    _, (_, paused), (_, after) = kept.rows
    assert (paused["checkpoint_s"], paused["validation_s"]) == (5.0, 8.0)
    assert paused["step_time"] == 1.0
    assert paused["tps"] == 500.0
    assert paused["data_pct"] == 0.0
    assert not {"checkpoint_s", "validation_s"} & set(after)


def test_eta_forgets_the_first_step_and_includes_pauses():
    meter, kept, clock = make(log_freq=1)
    with meter:
        run(meter, clock, [1], seconds=50.0)
        run(meter, clock, [2], seconds=2.0)
        with meter.timeline.pause("checkpoint"):
            clock.now += 10.0
        run(meter, clock, [3], seconds=2.0)
    etas = [row["eta_s"] for _, row in kept.rows]
    assert etas == pytest.approx([50 * 99, 2 * 98, (0.7 * 2 + 0.3 * 12) * 97])


def test_no_tensor_is_read_on_a_step_that_is_not_due(monkeypatch):
    meter, _, clock = make()
    reads = []

    def watch(name):
        original = getattr(torch.Tensor, name)

        def read(self, *arguments):
            reads.append(name)
            return original(self, *arguments)

        monkeypatch.setattr(torch.Tensor, name, read)

    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
        watch(name)
    with meter:
        for step in range(1, 20):
            clock.now += 1
            with meter.timeline.phase("data"):
                tokens = torch.tensor(1000)
            skipped = torch.tensor(False)
            meter.record(loss=torch.tensor(1.0), units=tokens, skipped=skipped)
            meter.flush(step)
            # One transfer each for the rows of steps 1 and 10.
            assert reads == ["tolist"] * (1 if step < 10 else 2)


def test_the_worst_rank_is_shown_beside_this_one():
    calls = []

    def gather(vector):
        calls.append(vector.dtype)
        other = vector.clone()
        other[:4] = torch.tensor([4.0, 0.0, 0.0, 75.0])
        return torch.stack([vector, other])

    meter, kept, clock = make(gather=gather)
    with meter:
        run(meter, clock, range(1, 10), seconds=2.0)
        assert calls == [torch.float64]
        run(meter, clock, [10], seconds=2.0)
    row = kept.rows[0][1]
    assert (row["step_time"], row["rank_step_time"]) == (4.0, 2.0)
    assert (row["data_pct"], row["rank_data_pct"]) == (75.0, 0.0)
    assert row["memory_gib"] == row["rank_memory_gib"] > 0
    # All ranks report the speed of the slowest.
    assert row["tps"] == 1000 / 4 / 2
    assert len(calls) == 2


def test_shares_are_those_of_all_ranks_since_the_last_row():
    counted = iter([{"cut_pct": (1, 4), "padding_pct": (0, 8)}, {"cut_pct": (0, 0)}])

    def gather(vector):
        other = vector.clone()
        places = [i for i, value in enumerate(vector.tolist()) if value in (1, 4)]
        other[places[-2:]] = torch.tensor([5.0, 8.0], dtype=torch.float64)
        return torch.stack([vector, other])

    meter, kept, clock = make(gather=gather, shares=lambda: next(counted))
    with meter:
        run(meter, clock, [1], seconds=2.0)
        meter.gather = None
        run(meter, clock, range(2, 11), seconds=2.0)
    first, second = (row for _, row in kept.rows)
    assert (first["cut_pct"], first["padding_pct"]) == (50.0, 0.0)
    assert second["cut_pct"] == 0.0
    assert "padding_pct" not in second


def test_log_writes_a_row_of_its_own_at_once():
    meter, kept, clock = make()
    with meter:
        run(meter, clock, [1])
        meter.log(1, validation_loss=torch.tensor(2.5))
        meter.log(2, validation_loss=3.0)
        meter.log(3, validation_loss=math.nan)
    assert kept.rows[1:3] == [(1, {"validation_loss": 2.5}), (2, {"validation_loss": 3.0})]
    assert kept.summary["best_validation_loss"] == 2.5


def test_the_summary_of_a_finished_run():
    meter, kept, clock = make(total_steps=20, start_step=10, start_units=500)
    with meter:
        run(meter, clock, range(11, 21), seconds=2.0)
        with meter.timeline.pause("checkpoint"):
            clock.now += 3.0
    memory = kept.summary.pop("memory_gib")
    assert memory >= max(row["memory_gib"] for _, row in kept.rows)
    expected = {"step": 20, "total_steps": 20, "steps": 10, "skipped": 0, "tokens": 10_500}
    expected |= {"seconds": 23.0, "tps": 250.0, "loss": 0.5}
    expected |= dict.fromkeys(("best_validation_loss", "stopped_by", "failed_sinks"))
    assert kept.summary == expected


def test_notes_make_a_row_due_and_are_in_it():
    meter, kept, clock = make()
    with meter:
        run(meter, clock, [1, 2])
        meter.record(loss=torch.tensor(9.0), units=1000, skipped=1)
        meter.flush(3, skipped_because="loss", loss_mean=2.0)
        run(meter, clock, range(4, 11))
    assert [step for step, _ in kept.rows] == [1, 3, 10]
    noted, last = kept.rows[1][1], kept.rows[2][1]
    assert (noted["loss"], noted["skipped_because"], noted["loss_mean"]) == (9.0, "loss", 2.0)
    assert "skipped_because" not in last


def test_after_a_rollback_steps_count_on_from_there_and_what_was_undone_is_summed_up():
    meter, kept, clock = make(total_steps=20, start_step=10, start_units=500)
    with meter:
        run(meter, clock, range(11, 15))
        meter.rewind_to(8, 300)
        run(meter, clock, [9, 10])
    # The row of step 14 was not due yet; nothing of it is lost.
    steps = [(step, row["tokens"]) for step, row in kept.rows]
    assert steps == [(11, 1500), (14, 4500), (10, 2300)]
    assert kept.started == 8, "the sinks were not told"
    summary = kept.summary
    assert (summary["step"], summary["steps"], summary["tokens"]) == (10, 4 + 2, 2300)
    assert summary["tps"] == 500.0


def test_a_run_that_stops_early_writes_its_last_step():
    kept = ran(range(1, 8))
    assert [step for step, _ in kept.rows] == [1, 7]
    assert kept.rows[1][1]["tokens"] == 7000
    assert (kept.summary["step"], kept.summary["stopped_by"]) == (7, None)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failed_run_is_closed_and_summed_up_without_a_collective(error):
    gather = Mock(side_effect=lambda vector: vector[None])
    meter, kept, clock = make(gather=gather)

    def fail():
        with meter:
            run(meter, clock, range(1, 8))
            raise error

    with pytest.raises(error):
        fail()
    assert gather.call_count == 1
    assert [step for step, _ in kept.rows] == [1]
    assert (kept.summary["step"], kept.summary["stopped_by"]) == (7, error.__name__)
    assert kept.summary["tokens"] == 1000


class Broken:
    """A sink that fails at one thing."""

    def __init__(self, at, error):
        self.at, self.error, self.asked = at, error, []
        for what in ("open", "write", "close"):
            setattr(self, what, partial(self.fail, what))

    def fail(self, what, *_):
        self.asked.append(what)
        if what == self.at:
            raise self.error


def test_a_sink_may_follow_every_step():
    meter, kept, clock = make()
    steps = []
    kept.after_step = steps.append
    with meter:
        run(meter, clock, range(1, 6))
    assert steps == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("at", "asked", "step"),
    [
        ("open", ["open", "close"], 0),
        ("write", ["open", "write", "close"], 1),
        ("close", ["open", "write", "write", "write", "write", "close"], 20),
    ],
)
def test_a_sink_that_fails_does_not_end_the_run_and_is_named(at, asked, step, caplog):
    first, broken, last = Kept(), Broken(at, OSError("disk\n full")), Kept()
    meter, _, clock = make()
    meter.sinks = [first, broken, last]
    with meter:
        run(meter, clock, range(1, 21))
        meter.event(20, "note")
    assert broken.asked == asked
    assert len(first.rows) == len(last.rows) == 4
    assert last.summary["failed_sinks"] == f"Broken (at step {step}: OSError: disk full)"
    assert meter.summary()["failed_sinks"] == last.summary["failed_sinks"]
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.message == (
        f"Broken failed to {at} at step {step}: OSError: disk full; the run continues without it"
    )
    assert record.exc_info[1] is broken.error


def test_a_sink_that_fails_again_when_it_is_closed_is_told_of_once(caplog):
    class Gone(Broken):
        def fail(self, what, *_):
            super().fail(what)
            if what == "close":
                raise ValueError("still")

    meter, _, clock = make()
    meter.sinks = [Gone("write", OSError("first"))]
    with meter:
        run(meter, clock, [1])
    assert meter.summary()["failed_sinks"] == "Gone (at step 1: OSError: first)"
    assert [record.levelname for record in caplog.records].count("ERROR") == 1


def test_a_run_that_rolls_back_leaves_a_failed_sink_alone():
    broken = Broken("write", OSError())
    meter, _, clock = make()
    meter.sinks = [broken]
    with meter:
        run(meter, clock, range(1, 11))
        meter.rewind_to(5, 5000)
    assert broken.asked == ["open", "write", "close"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("at", ["open", "write", "close"])
def test_a_wish_to_end_that_meets_a_sink_ends_the_run_and_the_others_are_closed(at, error):
    first, last = Kept(), Kept()
    meter, _, clock = make()
    meter.sinks = [first, Broken(at, error()), last]

    def train():
        with meter:
            run(meter, clock, [1])

    with pytest.raises(error):
        train()
    assert first.summary is not None
    assert (last.summary is None) == (last.started is None) == (at == "open")


@pytest.mark.parametrize(
    ("peak", "ending"),
    [
        (312e12, "; MFU = tokens/s/device x 6e+06 FLOPs/token / dense peak, 3.12e+14 FLOP/s"),
        # Of a CPU it is never known.
        (None, ""),
    ],
)
def test_rank_0_says_once_how_mfu_is_computed(caplog, peak, ending):
    caplog.set_level(logging.INFO, "torchtitan")
    with make(peak_flops=peak)[0]:
        pass
    with make(peak_flops=peak, rank=1)[0]:
        pass
    [message] = caplog.messages
    assert message == f"1,000 tokens per step on 2 x {Device('cpu').name}{ending}"


def test_the_hash_of_the_data_is_summed_over_ranks_to_the_bit():
    terms = iter([2**64 - 1, 2**53 + 1, 12345])

    def gather(vector):
        other = vector.clone()
        other[-2:] = torch.tensor([float(half) for half in divmod(2**62 + 3, 2**32)])
        return torch.stack([vector, other, other])

    kept = ran(range(1, 4), gather=gather, log_freq=1, data=lambda: (8, next(terms)))
    sums = [term + 2 * (2**62 + 3) for term in (2**64 - 1, 2**53 + 1, 12345)]
    assert [row["data_hash"] for _, row in kept.rows] == [f"{s % 2**64:016x}" for s in sums]
    assert kept.rows[0][1]["samples"] == 8


def test_the_hash_of_the_data_is_null_where_a_rank_does_not_know_it():
    assert ran([1], data=lambda: (8, None)).rows[0][1]["data_hash"] is None
    assert "samples" not in ran([1]).rows[0][1]
