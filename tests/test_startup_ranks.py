"""What a rank does at start does not grow with the number of ranks, where it need not."""

import importlib
from pathlib import Path
from typing import Any

import pytest

SIZES = (8, 64)
STEADY = (
    *("files opened", "broadcasts", "gathers on rank 0", "gathers on all ranks"),
    *("reductions of flags", "their bytes"),
)


@pytest.mark.gate
def test_a_start_among_more_ranks_does_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed one, which reads all that a start reads."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    benchmark = importlib.import_module("startup_ranks")
    found: dict[tuple[int, bool], Any] = {
        (one["ranks"], one["rank"] == 0): one for one in benchmark.count(SIZES, resumes=["must"])
    }
    for is_first in (True, False):
        few, many = (found[size, is_first] for size in SIZES)
        assert {name: few.get(name) for name in STEADY} == {name: many.get(name) for name in STEADY}
        assert "gathers on all ranks" not in many
        more = SIZES[1] - SIZES[0] if is_first else 0
        # Rank 0 gathers the positions in the data, and looks for notes of ranks that are no more.
        assert many["objects received"] - few["objects received"] == more
        assert many["entries of folders"] - few["entries of folders"] == more
