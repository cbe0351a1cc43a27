"""Ranks that are threads of this process, for modelling the communication between ranks.

Within `collectives`, communication works with such a group as with a process group.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class ThreadGroup:
    """Group of threads, as seen by one of them."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        """The ranks of a group share `barrier` and `values`, to exchange tensors."""
        self._rank, self.barrier, self.values = rank, barrier, values

    @classmethod
    def of(cls, ranks: int) -> list["ThreadGroup"]:
        """Return a group as seen by each of its ranks."""
        barrier, values = threading.Barrier(ranks), list[Any]([None] * ranks)
        return [cls(rank, barrier, values) for rank in range(ranks)]

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.values)

    def exchange(self, value: Tensor) -> list[Tensor]:
        """Gather a tensor of every rank, in rank order."""
        self.values[self._rank] = value.clone()
        self.barrier.wait()
        everyones = list(self.values)
        self.barrier.wait()
        return everyones


def together(calls: Mapping[ThreadGroup, Callable[[], T]]) -> list[T]:
    """Run the call of each rank of a group concurrently, without gradients; return the results."""

    def run(group: ThreadGroup, call: Callable[[], T]) -> T:
        with ExitStack() as stack:
            stack.callback(group.barrier.abort)  # else the others would wait for this one
            with torch.no_grad():
                result = call()
            stack.pop_all()
            return result

    with ThreadPoolExecutor(len(calls)) as pool:
        results = [pool.submit(run, group, call) for group, call in calls.items()]
        errors = [error for each in results if (error := each.exception())]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [each.result() for each in results]


def _all_reduce(group: ThreadGroup, tensor: Tensor) -> None:
    tensor.copy_(torch.stack(group.exchange(tensor)).sum(0))


def _all_gather(group: ThreadGroup, whole: Tensor, part: Tensor) -> None:
    whole.copy_(torch.cat([each.flatten() for each in group.exchange(part)]).view_as(whole))


def _reduce_scatter(group: ThreadGroup, part: Tensor, whole: Tensor) -> None:
    rows = torch.stack(group.exchange(whole)).sum(0).reshape(group.size(), -1)
    part.copy_(rows[group.rank()].view_as(part))


def _all_to_all(group: ThreadGroup, received: Tensor, sent: Tensor) -> None:
    rows = [each.reshape(group.size(), -1)[group.rank()] for each in group.exchange(sent)]
    received.copy_(torch.cat(rows).view_as(received))


COLLECTIVES: dict[str, Callable[..., None]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "all_gather_single": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}
"""Collectives by their names in torch.distributed."""


@contextmanager
def collectives() -> Iterator[None]:
    """Let torch's collectives also work on groups of threads, within the context."""

    def of(ours: Callable[..., None], theirs: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*tensors: Tensor, group: Any = None, **options: Any) -> Any:
            if isinstance(group, ThreadGroup):
                return ours(group, *tensors)
            return theirs(*tensors, group=group, **options)

        return collective

    with ExitStack() as stack:
        for name, ours in COLLECTIVES.items():
            if theirs := getattr(dist, name, None):
                stack.enter_context(patch.object(dist, name, of(ours, theirs)))
        yield
