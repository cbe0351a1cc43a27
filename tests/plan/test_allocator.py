"""The simulated allocator follows the rules that torch documents for its own."""

from torchtitan.plan.memory import MIB, CachingAllocator


def test_requests_are_rounded_and_small_ones_share_a_segment():
    allocator = CachingAllocator()
    allocator.allocate(1)
    allocator.allocate(513)
    assert (allocator.allocated, allocator.reserved) == (512 + 1024, 2 * MIB)
    allocator.allocate(MIB)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(MIB)
    assert allocator.reserved == 4 * MIB


def test_medium_requests_share_segments_and_large_ones_do_not():
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(5 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(11 * MIB)
    assert allocator.reserved == 32 * MIB


def test_a_rest_of_a_large_block_is_split_off_if_above_1_mib():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(32 * MIB))
    allocator.allocate(31 * MIB)
    assert allocator.allocated == 32 * MIB
    allocator.release(allocator.allocate(64 * MIB))
    allocator.allocate(50 * MIB)
    allocator.allocate(14 * MIB)
    assert allocator.reserved == 96 * MIB


def test_the_smallest_block_that_fits_is_taken():
    allocator = CachingAllocator()
    large, small = allocator.allocate(60 * MIB), allocator.allocate(30 * MIB)
    allocator.release(large)
    allocator.release(small)
    allocator.allocate(30 * MIB)
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 90 * MIB


def test_free_neighbors_merge():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(90 * MIB))
    blocks = [allocator.allocate(30 * MIB) for _ in range(3)]
    allocator.release(blocks[0])
    allocator.release(blocks[2])
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 130 * MIB, "two parts of 30 MiB are no part of 40"
    allocator.release(blocks[1])
    allocator.allocate(90 * MIB)
    assert allocator.reserved == 130 * MIB


def test_a_stream_does_not_use_the_blocks_of_another():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(30 * MIB, stream=1))
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 60 * MIB


def test_a_full_device_empties_the_cache():
    allocator = CachingAllocator(capacity=100 * MIB)
    allocator.release(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.retries, allocator.reserved, allocator.peak_reserved) == (
        1,
        80 * MIB,
        80 * MIB,
    )
    allocator.allocate(40 * MIB)
    assert (allocator.retries, allocator.peak_reserved) == (2, 120 * MIB), "it does not fit"


def test_an_expandable_segment_grows_at_its_end():
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.allocate(30 * MIB) for _ in range(4)]
    assert allocator.reserved == 120 * MIB
    allocator.release(blocks[0])
    allocator.release(blocks[3])
    allocator.allocate(50 * MIB)
    assert allocator.reserved == 140 * MIB, "the free 30 MiB at the end are part of it"
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 140 * MIB, "the gap is filled"


def test_the_end_of_an_expandable_segment_is_kept_for_larger_requests():
    allocator = CachingAllocator(expandable=True)
    first = [allocator.allocate(40 * MIB) for _ in range(2)]
    last = allocator.allocate(20 * MIB)
    allocator.release(first[0])
    allocator.release(last)
    allocator.allocate(20 * MIB)
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 140 * MIB


def test_a_full_device_unmaps_the_free_pages_of_expandable_segments():
    allocator = CachingAllocator(capacity=100 * MIB, expandable=True)
    allocator.allocate(10 * MIB, stream=1)
    allocator.release(allocator.allocate(60 * MIB))
    allocator.allocate(70 * MIB, stream=2)
    assert (allocator.retries, allocator.reserved) == (1, 100 * MIB)
