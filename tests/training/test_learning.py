"""Fewer bits learn as much: 200 steps in each precision, beside what the seed alone changes."""

import pytest

from benchmarks.learning import HARMED, LAST, PRECISIONS, STEPS, Learned, measure


@pytest.mark.slow
def test_each_precision_learns_what_bfloat16_learns() -> None:
    learned = measure()
    assert all(len(losses) == STEPS for losses in (*learned.seeds, *learned.runs.values()))
    assert {name: learned.is_same(name) for name in PRECISIONS} == dict.fromkeys(PRECISIONS, True)
    assert {name: learned.is_same(name) for name in HARMED} == dict.fromkeys(HARMED, False)
    start = learned.seeds[0][0]
    for name, losses in learned.runs.items():
        assert losses[0] == pytest.approx(start, rel=1e-2), f"{name} has another start"


def test_a_gap_is_measured_in_spreads() -> None:
    seeds = [[9.0] * LAST + [1.0 + seed / 10] * LAST for seed in range(5)]
    learned = Learned(seeds, {"near": [1.1] * LAST, "far": [1.2] * LAST})
    assert learned.spread == pytest.approx(0.158, abs=1e-3)
    assert learned.gap("far") == pytest.approx(0.2)
    assert learned.is_same("near")
    assert not learned.is_same("far")
