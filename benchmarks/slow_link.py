"""A link that is slowed on purpose: for tests and studies alone, no recipe can choose it.

    with slowed(Link(bandwidth=1e9, latency=20e-6, ranks_per_node=2)) as link: ...

The process groups that are made inside are gloo's, but what ranks of different nodes send each
other waits before it enters gloo, until the link would have carried it: b bytes occupy it for
8 b / `bandwidth` seconds, one message after the other, and arrive `latency` later for each hop of a
ring. So nothing is computed otherwise, and a message that overlaps with computation still does.
Bytes and hops are those of rings, as in `torchtitan.parallel.work.Traffic`. Every rank has a
link of its own, as GPUs with a network card each have; within a node nothing waits.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "slowed_gloo"


class Load(NamedTuple):
    """What a call puts on the link: bytes that this rank sends, and hops until all is there."""

    bytes: float
    hops: int


@dataclass
class Link:
    """The one link of this process."""

    bandwidth: float
    """Bits a second; may be changed between steps."""
    latency: float = 0.0
    """Seconds."""
    ranks_per_node: int = 1
    sent: float = 0.0
    """Bytes, so far."""
    waited: float = 0.0
    """Seconds for which they occupied the link, latencies included."""
    _waiting: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue)
    _free_at: float = 0.0

    def spans(self, ranks: Sequence[int]) -> bool:
        """Whether ranks are on several nodes."""
        return len({rank // self.ranks_per_node for rank in ranks}) > 1

    def carry(self, load: Load, begin: Callable[[], Any]) -> "Carried":
        """Call `begin` when the link has carried this, and after all that was sent before."""
        work, seconds = Carried(), 8 * load.bytes / self.bandwidth
        now = time.perf_counter()
        self._free_at = max(now, self._free_at) + seconds
        arrives = self._free_at + load.hops * self.latency
        self.sent += load.bytes
        self.waited += seconds + load.hops * self.latency

        def wait() -> None:
            time.sleep(max(arrives - time.perf_counter(), 0.0))
            work.start(begin)

        self._waiting.put(wait)
        return work

    def run(self) -> None:
        """Until `None` comes: the thread of the link."""
        while (wait := self._waiting.get()) is not None:
            wait()

    def close(self) -> None:
        self._waiting.put(None)


class Carried(dist.Work):
    """A call of gloo that begins later."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self.work: Any = None
        self.error: Exception | None = None

    def start(self, begin: Callable[[], Any]) -> None:
        try:
            self.work = begin()
        except Exception as error:  # raised where it is waited for
            self.error = error
        self.has_begun.set()

    def wait(self, timeout: Any = None) -> bool:
        self.has_begun.wait()
        if self.error is not None:
            raise self.error
        if self.work is not None:
            self.work.wait()
        return True

    def is_completed(self) -> bool:
        return self.has_begun.is_set() and (self.work is None or self.work.is_completed())


def size(tensors: Any) -> int:
    """Bytes of a tensor, or of all in lists."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(size, tensors))


def gathered(ranks: int, whole: Any, part: Any, *_: Any) -> Load:
    return Load(size(part) * (ranks - 1), ranks - 1)


def scattered(ranks: int, part: Any, whole: Any, *_: Any) -> Load:
    return Load(size(part) * (ranks - 1), ranks - 1)


def added(ranks: int, tensors: Any, *_: Any) -> Load:
    return Load(2 * size(tensors) * (ranks - 1) / ranks, 2 * (ranks - 1))


def exchanged(ranks: int, received: Any, sent: Any, *_: Any) -> Load:
    return Load(size(sent) * (ranks - 1) / ranks, 1)


def passed(ranks: int, tensors: Any, *_: Any) -> Load:
    return Load(size(tensors), 1)


LOADS: dict[str, Callable[..., Load]] = {
    "allreduce": added,
    "allreduce_coalesced": added,
    "broadcast": passed,
    "send": passed,
    **dict.fromkeys(("allgather", "all_gather_single", "_allgather_base"), gathered),
    **dict.fromkeys(("all_gather_single_coalesced", "allgather_into_tensor_coalesced"), gathered),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"), scattered),
    **dict.fromkeys(
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), scattered
    ),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), exchanged),
}
"""By method of a process group; torch 2.13 renamed some."""


class SlowedGroup(dist.ProcessGroup):
    """Gloo's, whose messages between nodes wait for the link."""

    def __init__(self, options: Any, link: Link) -> None:
        ranks = options.global_ranks_in_group or range(options.group_size)
        super().__init__(options.group_rank, options.group_size)
        gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
        # What is called from C++ comes here too, so what it becomes is another group's.
        self.plain = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        kind, device = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
        for group in (self, self.plain):
            group._register_backend(device, kind, gloo)
            group._set_default_backend(kind)
        self.ranks, self.link = tuple(ranks), link

    def carry(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Begin a call of gloo, at once within a node."""
        begin = partial(getattr(self.plain, name), *arguments)
        ranks = self.ranks
        if name == "send":
            ranks = (self.ranks[self.rank()], self.ranks[arguments[1]])
        if not self.link.spans(ranks):
            return begin()
        return self.link.carry(LOADS[name](len(self.ranks), *arguments), begin)


def _slowed(name: str) -> Callable[..., Any]:
    def call(self: SlowedGroup, *arguments: Any) -> Any:
        return self.carry(name, arguments)

    return call


for _name in LOADS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(SlowedGroup, _name, _slowed(_name))


@contextmanager
def slowed(link: Link) -> Iterator[Link]:
    """Inside, the process groups of the backend `NAME` have this link."""
    thread = threading.Thread(target=link.run, daemon=True)
    thread.start()
    dist.Backend.register_backend(
        NAME, lambda options, _: SlowedGroup(options, link), extended_api=True, devices=["cpu"]
    )
    try:
        yield link
    finally:
        link.close()
        thread.join()
