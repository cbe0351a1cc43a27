"""What a rank does at start does not grow with the number of ranks, where it need not."""

import pytest

from tests.starts import count

FEW, MANY = 8, 64
STEADY = (
    *("files opened", "broadcasts", "gathers on rank 0", "gathers on all ranks"),
    *("reductions of flags", "their bytes"),
)


@pytest.mark.gate
def test_a_start_among_more_ranks_does_no_more(tmp_path):
    """A resumed one, which reads all that a start reads."""
    found = count((FEW, MANY), tmp_path)
    for is_first in (True, False):
        few, many = found[FEW, is_first], found[MANY, is_first]
        assert {name: few.get(name) for name in STEADY} == {name: many.get(name) for name in STEADY}
        assert "gathers on all ranks" not in many
        more = MANY - FEW if is_first else 0
        # Rank 0 gathers the positions in the data, and looks for notes of ranks that are no more.
        assert many["objects received"] - few["objects received"] == more
        assert many["entries of folders"] - few["entries of folders"] == more
