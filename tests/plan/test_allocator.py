"""The simulated allocator follows the rules that torch documents for its own."""

import pytest

from tests.tables import table
from torchtitan.plan.memory import MIB, CachingAllocator

CASES = {name: (way, steps) for name, way, steps in table(__file__, "allocator.txt")}


@pytest.mark.parametrize("case", CASES)
def test_rules(case):
    way, steps = CASES[case]
    allocator, blocks = CachingAllocator(expandable=way == "expandable"), {}
    for step in steps.split(", "):
        what, size, *stream = step.split()
        if what == "reserved":
            assert allocator.reserved == int(size) * MIB
        elif what == "free":
            allocator.release(blocks.pop(size))
        else:
            count = int(size[:-1]) if size.endswith("B") else int(size) * MIB
            blocks[what] = allocator.allocate(count, *map(int, stream))


def test_sizes_are_rounded_and_little_is_left_of_a_large_block():
    small, large = CachingAllocator(), CachingAllocator()
    small.allocate(1)
    small.allocate(513)
    assert small.allocated == 512 + 1024
    large.release(large.allocate(32 * MIB))
    large.allocate(31 * MIB)
    assert large.allocated == 32 * MIB
