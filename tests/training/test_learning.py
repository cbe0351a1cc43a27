"""Fewer bits learn as much: 200 steps in each precision, beside what the seed alone changes."""

from pathlib import Path

import pytest

from benchmarks.learning import HARMED, PRECISIONS, STEPS, Learned, Run, measure


@pytest.mark.slow
def test_each_precision_learns_what_bfloat16_learns():
    learned = measure()
    assert {name: learned.is_same(name) for name in PRECISIONS} == dict.fromkeys(PRECISIONS, True)
    assert {name: learned.is_same(name) for name in HARMED} == dict.fromkeys(HARMED, False)
    start = learned.seeds[0].losses[0]
    for name in PRECISIONS:
        losses = learned.runs[name].losses
        assert len(losses) == STEPS
        assert losses[0] == pytest.approx(start, rel=1e-2), f"{name} has another start"


def test_a_gap_is_measured_in_spreads():
    seeds = [Run([], 1.0 + seed / 10) for seed in range(5)]
    learned = Learned(seeds, {"near": Run([], 1.3), "far": Run([], 1.4)})
    assert learned.spread == pytest.approx(0.158, abs=1e-3)
    assert learned.gap("far") == pytest.approx(0.4)
    assert learned.is_same("near")
    assert not learned.is_same("far")


def test_the_page_is_of_these_runs():
    page = Path(__file__).parents[2] / "benchmarks/results/learning.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if "|" in line]
    verdicts = {row[0]: row[-1] for row in rows[2 + 5 :]}
    assert verdicts == dict.fromkeys(PRECISIONS, "yes") | dict.fromkeys(HARMED, "no")
