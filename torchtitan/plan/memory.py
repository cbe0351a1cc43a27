"""Memory of a device in a step: what torch's caching allocator reserves, and what libraries take.

Allocations are replayed. The allocator rounds requests up, takes memory from the device in
segments, splits them, and joins neighbors that are free; memory of one stream is not used by
another (torch's documentation of `torch.cuda.memory`, and c10/cuda/CUDACachingAllocator.cpp). What
it reserves exceeds what tensors use by the fragments that fit no request. Expandable segments, one
for each stream, leave fewer of them: a request that fits no block extends the free end of the
segment.

Outside of torch's allocator there are:

- CUDA's context, with the kernels of torch and its libraries.
- Buffers of NCCL. Each process group that sends has a communicator. An all-reduce takes 544 MB on
  A100 with NVLink among 2 ranks, and 688 MB among more, which further nodes do not change
  (NVIDIA/nccl#964, #986). Two ranks of a node that exchange messages have buffers for that in
  addition: an all-to-all among 8 H100 takes 3.28 GB (NVIDIA/nccl#1685).
- The symmetric memory of asynchronous tensor parallelism, as large as the largest shard that is
  gathered, or two of the shards that are reduced (`torch.distributed._symmetric_memory`).

Inside of it are cuBLAS's workspaces, one for each thread that computes products: that of the
forward and that of the backward (torch's CublasHandlePool.cpp).
"""

import bisect
import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torchtitan.comm import Operation
from torchtitan.device import GIB, allocator_settings
from torchtitan.job import JobConfig
from torchtitan.plan.expansion import RankStep, StepSegment
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.messages import messages_of
from torchtitan.plan.recording import Change, Event

MIB = 1024**2
SMALLEST = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
"""Requests up to this size share segments of their own, of this size."""
MEDIUM, MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
"""Requests below this size are taken from segments of this size."""
ROUNDED = 2 * MIB
"""Unit of the segments of larger requests."""
PAGE = 20 * MIB
"""Unit in which an expandable segment of large requests grows; of small ones: SMALL_SEGMENT."""
PAIR_GIB: Final = 3.28e9 / 7 / GIB
"""Memory of NCCL for the messages of two ranks of a node."""
THREADS: Final = 2
"""Threads that compute products."""
WORKSPACE: Final = 32 * 1024**2
SMALL_WORKSPACE: Final = 8320 * 1024
"""Bytes of a workspace of cuBLAS: on Hopper and later, and before."""
STEPS = 2
"""Steps that are replayed: the second meets the fragments of the first."""


@dataclass(frozen=True)
class Reserved:
    """Memory of a rank at its peak, in bytes."""

    peak_allocated: int
    """Bytes of all tensors, rounded as the allocator does."""
    peak_reserved: int
    """Bytes of all segments."""
    largest_request: int
    """Bytes of the largest tensor."""
    moment: str
    """Name of the segment of the step at the peak of the tensors."""


@dataclass(eq=False)
class MemoryBlock:
    """Part of a segment."""

    pool: tuple[int, bool]
    size: int
    is_free: bool = False
    before: "MemoryBlock | None" = None
    after: "MemoryBlock | None" = None


@dataclass
class CachingAllocator:
    """Allocator of one device, whose memory has no end."""

    expandable: bool = False
    """Whether its segments are expandable."""
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    free_blocks: dict[tuple[int, bool], list[tuple[int, int, MemoryBlock]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Free blocks of each pool, sorted by size."""
    count: int = 0
    ends: dict[tuple[int, bool], MemoryBlock] = field(default_factory=dict)
    """Last block of the expandable segment of each pool."""

    def allocate(self, size: int, stream: int = 0) -> MemoryBlock:
        """Take the smallest free block of the stream that fits, or a new segment."""
        size = max(-(-size // SMALLEST) * SMALLEST, SMALLEST)
        is_small = size <= SMALL
        pool = stream, is_small
        known = self.free_blocks[pool]
        at = bisect.bisect_left(known, (size,))
        if at + 1 < len(known) and known[at][-1] is self.ends.get(pool):
            at += 1  # the end of an expandable segment counts as the largest
        if at < len(known):
            block = known.pop(at)[-1]
        elif self.expandable:
            block = self._extend(pool, size)
        else:
            block = MemoryBlock(pool, _segment(size))
            self.reserved += block.size
        rest = block.size - size
        if rest >= SMALLEST if is_small or self.expandable else rest > SMALL:
            block.size = size
            remainder = MemoryBlock(pool, rest, before=block, after=block.after)
            if block.after:
                block.after.before = remainder
            block.after = remainder
            if self.ends.get(pool) is block:
                self.ends[pool] = remainder
            self._keep(remainder)
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: MemoryBlock) -> None:
        """Free a block, and join it with its free neighbors."""
        self.allocated -= block.size
        if (before := block.before) and before.is_free:
            self._forget(before)
            block.size += before.size
            block.before = before.before
            if block.before:
                block.before.after = block
        if (after := block.after) and after.is_free:
            self._forget(after)
            block.size += after.size
            block.after = after.after
            if block.after:
                block.after.before = block
            elif self.expandable:
                self.ends[block.pool] = block
        self._keep(block)

    def _extend(self, pool: tuple[int, bool], size: int) -> MemoryBlock:
        """Return the free end of a segment, extended to `size` or more."""
        end = self.ends.get(pool)
        if end is None or not end.is_free:
            block = MemoryBlock(pool, 0, before=end)
            if end is not None:
                end.after = block
        else:
            block = end
            self._forget(block)
        missing, page = size - block.size, SMALL_SEGMENT if pool[1] else PAGE
        self.ends[pool] = block
        pages = -(-missing // page) * page
        block.size += pages
        self.reserved += pages
        return block

    def _keep(self, block: MemoryBlock) -> None:
        block.is_free = True
        self.count += 1
        block_key = (block.size, self.count, block)
        bisect.insort(self.free_blocks[block.pool], block_key)

    def _forget(self, block: MemoryBlock) -> None:
        known = self.free_blocks[block.pool]
        at = bisect.bisect_left(known, (block.size,))
        while known[at][-1] is not block:
            at += 1
        del known[at]


def _segment(size: int) -> int:
    """Return the size of the segment that is made for a request."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return MEDIUM_SEGMENT if size < MEDIUM else -(-size // ROUNDED) * ROUNDED


def of_tensors(step: RankStep) -> Reserved:
    """Return the memory of a step on a CPU, whose allocator keeps nothing."""
    moment, level = step.peak()
    changes = (e for s in (step.before, *step.segments) for e in s.events if isinstance(e, Change))
    largest = max(each.bytes for each in changes)
    return Reserved(level.total(), level.total(), largest, moment)


def reserved(step: RankStep, workspaces: Iterable[int] = ()) -> Reserved:
    """Return the memory of a step at its peak.

    The first step allocates the optimizer states, as in training: in its update, where they take
    the place of activations.

    Args:
        workspaces: bytes that libraries keep in all steps.
    """
    allocator = CachingAllocator("expandable_segments:True" in allocator_settings())
    for size in workspaces:
        allocator.allocate(size)
    replay, segments = _Replay(step, allocator), _without_repetitions(step)
    changes = [event for event in step.before.events if isinstance(event, Change)]
    states = [change for change in changes if replay.is_state(change)]
    replay.segment("", [change for change in changes if not replay.is_state(change)])
    for number in range(STEPS):
        if number == 1:
            replay.drop_rest({change.storage for change in changes})
        for segment in segments:
            if segment.name == "update" and number == 0:
                replay.segment(segment.name, states)
            replay.segment(segment.name, segment.events)
    return Reserved(replay.peak, allocator.reserved, replay.largest, replay.moment)


def _without_repetitions(step: RankStep) -> list[StepSegment]:
    """Return the segments of a step with at most two equal accumulated batches in a row."""
    passes: list[list[StepSegment]] = [[]]
    for segment in step.segments:
        if segment.name in ("forward", "pipeline"):
            passes.append([])
        passes[-1].append(segment)
    names = [[id(segment) for segment in each] for each in passes]
    kept = (
        each
        for number, each in enumerate(passes)
        if number < 2 or not names[number] == names[number - 1] == names[number - 2]
    )
    return list(itertools.chain.from_iterable(kept))


class _Replay:
    """Replay of the changes of a step.

    A storage of repeated work has several living blocks, one for each repetition.
    """

    def __init__(self, step: RankStep, allocator: CachingAllocator) -> None:
        self.allocator, self.storages = allocator, step.source.recording.storages
        self.peak, self.moment, self.largest = 0, "", 0
        self._living: dict[int, deque[MemoryBlock]] = defaultdict(deque)
        self._alike: dict[tuple[str, int], deque[int]] = defaultdict(deque)
        """Storages of the living blocks of an operator and a size, in the order of allocation."""

    def is_state(self, change: Change) -> bool:
        """Whether it is of an optimizer state."""
        return self.storages[change.storage].kind == "optimizer states"

    def segment(self, name: str, events: Sequence[Event]) -> None:
        """Replay a segment of the step."""
        self.allocator.peak_allocated = self.allocator.allocated
        for event in events:
            if isinstance(event, Change) and not self.storages[event.storage].on_host:
                if event.bytes > 0:
                    self._allocate(event.storage, event.bytes)
                else:
                    self._release(event.storage, -event.bytes)
        if self.allocator.peak_allocated > self.peak:
            self.peak, self.moment = self.allocator.peak_allocated, name

    def drop_rest(self, kept: Collection[int]) -> None:
        """Free all storages but `kept`: the next step drops the gradients."""
        for storage in self._living.keys() - kept:
            while self._living[storage]:
                self.allocator.release(self._living[storage].pop())
        self._alike.clear()

    def _allocate(self, storage: int, size: int) -> None:
        record = self.storages[storage]
        self.largest = max(self.largest, size)
        self._living[storage].append(self.allocator.allocate(size, record.stream))
        self._alike[record.allocated_by, size].append(storage)

    def _release(self, storage: int, size: int) -> None:
        alike = self._alike[self.storages[storage].allocated_by, size]
        if self._living[storage]:
            block = self._living[storage].pop()
        else:  # a repeated segment frees the copy of the repetition before: the oldest alike
            found = next((each for each in alike if self._living[each]), None)
            if found is None:
                return  # allocated by what was not recorded
            storage, block = found, self._living[found].popleft()
        if storage in alike:
            alike.remove(storage)
        self.allocator.release(block)


def outside(
    job: JobConfig, ranks: int, rank: int, step: RankStep, hardware: Hardware
) -> dict[str, float]:
    """Return the GiB outside of torch's allocator on the device of `rank`, by their use."""
    found = {"context and kernels": hardware.outside_allocator_gib}
    if hardware.device_type == "cpu":
        return found
    members, axes, sent = step.source.members, step.source.axes, {*messages_of(step)}
    # Tokens and losses are summed, and steps agreed on, outside of the recording.
    used = {each.group for each in sent} | {name for name in members if len(members[name]) == ranks}
    if count := sum(len(members[name]) > 1 for name in used):
        pairs = {(each.group, each.operation) for each in sent}
        near = (_near(rank, members[group], how, hardware) for group, how in pairs)
        found["communicators"] = count * hardware.communicator_gib + sum(near) * PAIR_GIB
    if job.parallelism.enable_async_tensor_parallel:
        shards = (
            each.bytes * (2 if each.operation == "reduce_scatter" else 1) / len(members[each.group])
            for each in sent
            if axes[each.group] == "tp"
        )
        found["symmetric memory"] = max(shards, default=0.0) / GIB
    return found


def workspaces(hardware: Hardware | None) -> list[int]:
    """Return the sizes of cuBLAS's workspaces."""
    is_old = hardware is not None and hardware.peaks.float8 is None
    return [SMALL_WORKSPACE if is_old else WORKSPACE] * THREADS


def _near(rank: int, members: Sequence[int], operation: Operation, hardware: Hardware) -> int:
    """Return the number of ranks in the same node with which a rank exchanges messages."""
    if operation == "send":
        at = members.index(rank)
        members = [members[at - 1], members[(at + 1) % len(members)]]
    elif operation != "all_to_all":
        return 0
    return sum(
        each // hardware.ranks_per_node == rank // hardware.ranks_per_node
        for each in {*members} - {rank}
    )
