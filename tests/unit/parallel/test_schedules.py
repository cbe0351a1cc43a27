"""What schedules ask for, as torch does; the time they waste; schedules from files."""

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.tables import table
from torchtitan.config import ConfigError
from torchtitan.parallel import schedules
from torchtitan.parallel.schedules import (
    SCHEDULES,
    Action,
    bubble,
    forward_steps,
    order,
    parse,
    timeline,
)
from torchtitan.torch_private.pipeline_stages import pipeline_order

STAGES = {"one": (1,), "two": (2,), "several": (2, 3)}
LAYOUTS = [
    (name, each * pp, pp, microbatches)
    for name, schedule in SCHEDULES.items()
    for pp in (2, 3)
    for each in STAGES[schedule.stages]
    for microbatches in range(1, 10)
]


def test_torch_runs_what_we_say_it_runs():
    for name, stages, pp, microbatches in LAYOUTS:
        schedule = SCHEDULES[name]
        assert schedule.fits(stages, pp)
        if schedule.stages == "one":
            continue  # torch's classes for one stage a rank want a real stage
        try:
            pipeline_order(name, stages, pp, microbatches)
        except ValueError:
            assert not schedule.runs(microbatches, stages, pp), (name, stages, pp, microbatches)
        else:
            assert schedule.runs(microbatches, stages, pp), (name, stages, pp, microbatches)


def test_number_of_stages_that_fit():
    fits = {name: [n for n in range(1, 10) if s.fits(n, 2)] for name, s in SCHEDULES.items()}
    assert fits["GPipe"] == fits["1F1B"] == [2]
    assert fits["Interleaved1F1B"] == fits["LoopedBFS"] == [4, 6, 8]
    assert fits["ZBVZeroBubble"] == fits["DualPipeV"] == [4]


def test_every_order_can_be_followed_and_has_no_fault():
    for name, stages, pp, microbatches in LAYOUTS:
        if SCHEDULES[name].runs(microbatches, stages, pp) and microbatches in (6, 8):
            orders = order(name, stages, pp, microbatches)
            assert not list(schedules.order_problems(orders, pp, microbatches))
            assert schedules.ranks(orders) == SCHEDULES[name].ranks(stages, pp)


def test_a_rank_does_one_thing_at_a_time_and_in_order():
    slots = timeline(order("DualPipeV", 8, 4, 8))
    for rank in range(4):
        mine = [slot for slot in slots if slot.rank == rank]
        assert all(one.end <= next.start for one, next in itertools.pairwise(mine))
    start = {slot.action: slot.start for slot in slots}
    end = {slot.action: slot.end for slot in slots}
    for stage, microbatch in itertools.product(range(1, 8), range(8)):
        before = Action(stage - 1, "F", microbatch)
        assert start[Action(stage, "F", microbatch)] >= end[before]


def wasted(name, stages, pp, microbatches):
    return bubble(timeline(order(name, stages, pp, microbatches)))


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 12), (8, 32)])
def test_bubble_is_that_of_the_textbook(pp, microbatches):
    expected = (pp - 1) / (microbatches + pp - 1)
    for name in ("GPipe", "1F1B"):
        assert wasted(name, pp, pp, microbatches) == pytest.approx(expected)
    for laps in (2, 3):
        expected = (pp - 1) / (laps * microbatches + pp - 1)
        for name in ("Interleaved1F1B", "LoopedBFS"):
            assert wasted(name, laps * pp, pp, microbatches) == pytest.approx(expected)


def test_zero_bubble_wastes_less_still():
    found = {n: wasted(n, 4 if s.stages == "one" else 8, 4, 16) for n, s in SCHEDULES.items()}
    worst_split = max(found[name] for name, s in SCHEDULES.items() if s.splits_backward)
    assert worst_split < found["Interleaved1F1B"] < found["1F1B"] == found["GPipe"]
    assert found["ZBVZeroBubble"] == pytest.approx(0.0303, abs=1e-4)


def test_idle_time_is_what_is_left():
    slots = timeline({0: [Action(0, "F", 0), Action(0, "B", 0)], 1: parse("1F0") + parse("1B0")})
    assert [(str(slot.action), slot.start, slot.end) for slot in slots] == [
        ("0F0", 0, 1),
        ("1F0", 1, 2),
        ("1B0", 2, 4),
        ("0B0", 4, 6),
    ]
    assert bubble(slots) == 0.5


@pytest.mark.parametrize("name", SCHEDULES)
def test_forward_steps_do_everything_once_and_waste_little(name):
    pp, microbatches = 4, 8
    stages = pp if SCHEDULES[name].stages == "one" else 2 * pp
    ranks = SCHEDULES[name].ranks(stages, pp)
    steps = list(forward_steps(ranks, microbatches))
    done = set()
    for step in steps:
        for rank, action in step.items():
            assert ranks[action.stage] == rank
            assert action.stage == 0 or action._replace(stage=action.stage - 1) in done
        done |= set(step.values())
    assert Counter(action.stage for step in steps for action in step.values()) == Counter(
        dict.fromkeys(range(stages), microbatches)
    )
    assert len(steps) <= microbatches * stages // pp + stages


def write(path, *rows):
    path.write_text("\n".join(rows))
    return path


def test_a_file_reads_as_torch_reads_it(tmp_path):
    path = write(tmp_path / "order.csv", "0F0,,0F1, 0I0,0B1,0W0", "1F0,1B0,(1F1;1B1)OVERLAP_F_B")
    orders = schedules.read(path)
    assert [str(action) for action in orders[0]] == ["0F0", "0F1", "0I0", "0B1", "0W0"]
    assert [str(action) for action in orders[1]] == ["1F0", "1B0", "1F1", "1B1"]
    assert not list(schedules.order_problems(orders, 2, 2))
    assert schedules.ranks(orders) == (0, 1)


@pytest.mark.parametrize("cell", ["0X0", "F0", "0F", "0SEND_F0", "0UNSHARD", "(0F0;)B", "0F0x"])
def test_a_cell_that_is_no_action_is_shown_with_its_place(cell, tmp_path):
    path = write(tmp_path / "order.csv", "0F0,0B0", f"1F0,{cell}")
    with pytest.raises(ConfigError, match=r"row 2, column 2: .* is not an action; .* as in 2F0"):
        schedules.read(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="it cannot be read"):
        schedules.read(tmp_path / "none.csv")


@pytest.mark.parametrize(("rows", "told"), table(__file__, "bad_orders.txt"))
def test_a_file_that_cannot_be_run(rows, told, tmp_path):
    orders = schedules.read(write(tmp_path / "order.csv", *rows.split("/")))
    assert told in " | ".join(schedules.order_problems(orders, 2, 1))


def test_ranks_that_wait_for_each_other_are_found(tmp_path):
    rows = ("0F0,2F0,2B0,0F1,2F1,2B1,0B0,0B1", "1F1,1F0,1B0,1B1")
    assert list(
        schedules.order_problems(schedules.read(write(tmp_path / "o.csv", *rows)), 2, 2)
    ) == ["rank 0 would wait forever for 2F0; wanted an order in which its inputs arrive first"]


def test_bubbles_in_the_docs_are_the_predicted_ones():
    page = (Path(__file__).parents[3] / "docs/parallelism.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\d) \| ([\d.]+)% \| ([\d.]+)% \|$", page, re.MULTILINE)
    assert [name for name, *_ in rows] == list(SCHEDULES)
    for name, each, *said in rows:
        orders = (order(name, 4 * int(each), 4, number) for number in (8, 32))
        found = [bubble(timeline(one)) for one in orders]
        assert [f"{bubble:.1%}" for bubble in found] == [f"{value}%" for value in said]
