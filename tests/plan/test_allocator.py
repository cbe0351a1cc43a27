"""The simulated allocator follows the rules that torch documents for its own."""

import pytest

from torchtitan.plan.memory import MIB, CachingAllocator

CASES = {
    "requests are rounded, and small ones share a segment": (
        {},
        [("a", 1 / MIB), ("b", 513 / MIB), 2, ("c", 1), 2, ("d", 1), 4],
    ),
    "medium requests share segments, and large ones do not": (
        {},
        [("a", 5), ("b", 5), ("c", 5), ("d", 5), 20, ("e", 11), 32],
    ),
    "a rest of a large block is split off if above 1 MiB": (
        {},
        [("a", 32), "a", ("b", 31), 32, ("c", 64), "c", ("d", 50), ("e", 14), 96],
    ),
    "the smallest block that fits is taken": (
        {},
        [("a", 60), ("b", 30), "a", "b", ("c", 30), ("d", 60), 90],
    ),
    "free neighbors merge; two parts of 30 MiB are no part of 40": (
        {},
        [
            *(("a", 90), "a", ("b", 30), ("c", 30), ("d", 30), "b", "d"),
            *(("e", 40), 130, "c", ("f", 90), 130),
        ],
    ),
    "a stream does not use the blocks of another": ({}, [("a", 30, 1), "a", ("b", 30), 60]),
    "an expandable segment grows at its end; then the gap is filled": (
        {"expandable": True},
        [
            *(("a", 30), ("b", 30), ("c", 30), ("d", 30), 120, "a", "d"),
            *(("e", 50), 140, ("f", 30), 140),
        ],
    ),
    "the end of an expandable segment is kept for larger requests": (
        {"expandable": True},
        [("a", 40), ("b", 40), ("c", 20), "a", "c", ("d", 20), ("e", 60), 140],
    ),
}
"""Settings, then steps: (name, MiB, stream) to allocate, a name to free, or the reserved MiB."""


@pytest.mark.parametrize("case", CASES)
def test_rules(case):
    settings, steps = CASES[case]
    allocator, blocks = CachingAllocator(**settings), {}
    for step in steps:
        if isinstance(step, tuple):
            name, size, *stream = step
            blocks[name] = allocator.allocate(int(size * MIB), *stream)
        elif isinstance(step, str):
            allocator.release(blocks.pop(step))
        else:
            assert allocator.reserved == step * MIB


def test_sizes_are_rounded_and_little_is_left_of_a_large_block():
    small, large = CachingAllocator(), CachingAllocator()
    small.allocate(1)
    small.allocate(513)
    assert small.allocated == 512 + 1024
    large.release(large.allocate(32 * MIB))
    large.allocate(31 * MIB)
    assert large.allocated == 32 * MIB
