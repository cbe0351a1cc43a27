"""The timeline: phases that follow one another without a gap."""

import time

import pytest

from tests.unit.metrics.test_meter import Clock
from torchtitan.device import Device
from torchtitan.timeline import Timeline, age_of_process


def walls(timeline):
    return {name: spent.wall for name, spent in timeline.take().items()}


def test_phases_add_up_to_the_time_that_went_by():
    clock = Clock()
    timeline = Timeline(Device("cpu"), clock)
    clock.now += 1
    with timeline.phase("pipeline"):
        clock.now += 2
        for _ in range(2):
            with timeline.phase("forward"):
                clock.now += 4
        clock.now += 8
    clock.now += 16
    assert walls(timeline) == {"other": 17, "pipeline": 10, "forward": 8}
    clock.now += 3
    assert walls(timeline) == {"other": 3}


def test_a_pause_is_told_as_a_whole():
    clock = Clock()
    timeline = Timeline(Device("cpu"), clock)
    with timeline.pause("validation"):
        with timeline.phase("forward"):
            clock.now += 1
        with timeline.pause("checkpoint"):
            clock.now += 2
        clock.now += 4
    with timeline.phase("forward"):
        clock.now += 8
    assert walls(timeline) == {"other": 0, "validation": 7, "forward": 8}


def test_a_phase_that_fails_ends():
    clock = Clock()
    timeline = Timeline(Device("cpu"), clock)

    def fail():
        with timeline.pause("checkpoint"):
            clock.now += 1
            raise OSError

    with pytest.raises(OSError):
        fail()
    with timeline.phase("data"):
        clock.now += 2
    assert walls(timeline) == {"other": 0, "checkpoint": 1, "data": 2}


def test_what_is_not_taken_yet_can_be_forgotten():
    clock = Clock()
    timeline = Timeline(Device("cpu"), clock)
    clock.now += 5
    timeline.begin()
    clock.now += 1
    assert walls(timeline) == {"other": 1}


def test_waiting_is_not_work():
    timeline = Timeline(Device("cpu"))
    with timeline.phase("sync"):
        time.sleep(0.05)
    with timeline.phase("forward"):
        sum(range(300_000))
    spent = timeline.take()
    assert spent["sync"].busy < spent["sync"].wall / 2
    assert spent["forward"].busy > 0


def test_a_process_knows_its_age():
    age = age_of_process()
    assert age is not None
    later = age_of_process()
    assert later is not None
    assert 0 < age <= later
