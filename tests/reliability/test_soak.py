"""A long run ends with the memory, files, threads and processes that it had early on."""

from pathlib import Path

import pytest

from tests.reliability.soak import LAYOUTS, soak

GROWTH = 1.10
"""Of resident memory, as caches fill slowly; what each step leaked was more after 2,000 of them."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_long_run_holds_no_more_at_its_end(layout: str, tmp_path: Path) -> None:
    for rank in soak(layout, tmp_path):
        for kind in ("files", "threads", "processes"):
            first, last = rank.ends(kind)
            assert first == last, f"{layout}, rank {rank.rank}: {kind}"
        first, last = rank.ends("resident")
        assert last < first * GROWTH, f"{layout}, rank {rank.rank}: resident memory"
