"""A save and a load among 256 ranks that do not exist, counted: nothing is sent or read a piece."""

import pytest

from benchmarks.save_at_scale import measure

RANKS = 256


@pytest.mark.gate
def test_what_a_rank_sends_and_reads_is_of_its_own_size():
    found = measure("llama3_8b", RANKS)
    assert found["manifest_items"] == 291 * 4 + 1, "weights, three states of each, one generator"
    # A name, a size and a hash of each rank, and a sum for each item.
    assert found["gathered_bytes"] < 250 * RANKS + 2 * 8 * found["manifest_items"]
    # A first save also gathers a hash of each rank, and the items of one.
    assert found["first_gathered_bytes"] < found["gathered_bytes"] + 50 * RANKS
    assert found["files_opened_per_rank"] == 4, "manifest, state, its file, and the first rank's"
    # A line for each file and item in the manifest, and one for each item in two headers.
    assert found["load_bytes_per_rank"] < 150 * RANKS + 500 * found["manifest_items"]
