"""Layouts that together have every pair of settings train the same run as one rank."""

import pytest

from tests import cover
from tests.parallel import test_parity

COVER = cover.cover()


@pytest.mark.gate
@pytest.mark.costs("ranks")
@pytest.mark.parametrize("name", COVER)
def test_layout_trains_the_same_run_as_one_rank(name):
    test_parity.is_the_run_of_one_rank(COVER[name], "cpu")


def test_no_pair_of_settings_is_missing():
    """A pair that no run has is refused as a recipe, and no run of the cover is."""
    found = set[frozenset[str]]()
    for name in COVER:
        settings = frozenset(name.split("; "))
        assert cover.is_valid(settings), f"{name} is refused; run python -m tests.cover"
        found |= cover.pairs_of(settings)
    missing = [pair for pair in cover.all_pairs() if pair not in found and cover.possible(pair)]
    assert missing == [], "run python -m tests.cover"


def test_every_axis_and_mode_is_a_setting():
    layouts = COVER.values()
    for axis in ("pp", "replicate", "shard", "cp", "tp"):
        assert max(getattr(layout, axis) for layout in layouts) > 1
    assert {name for runs in COVER for name in runs.split("; ")} == cover.SETTINGS.keys()
