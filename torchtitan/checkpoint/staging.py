"""Copies what a save writes, so that training can go on while it is written.

The weights of a step stay as they are until the next step's update, so they are copied while its
forward and backward run; only the update has to wait, and only if it comes first. On CUDA the
device copies, on a stream of its own, into pinned memory; on a CPU a thread does. The memory is
kept for the next save.
"""

import time
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Generic, TypeVar

import torch
from torch import Tensor

from torchtitan.checkpoint.storage import Piece, digest
from torchtitan.device import Device

T = TypeVar("T")
Pieces = list[tuple[Piece, Tensor]]
Copies = list[tuple[Tensor, Tensor]]
"""With the digests of what was copied."""


class Task(Generic[T]):
    """Work on a thread of its own, which does not keep a process that fails from ending."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work, self.seconds = work, 0.0
        pool = ThreadPool(1)
        self._result = pool.apply_async(self._run)
        pool.close()

    def _run(self) -> T:
        began = time.perf_counter()
        value = self._work()
        self.seconds = time.perf_counter() - began
        return value

    def wait(self) -> None:
        """Return when the work has ended, however it did."""
        self._result.wait()

    @property
    def is_done(self) -> bool:
        return self._result.ready()

    def result(self) -> T:
        """Wait for the work; what it returned, or the error that it ended with."""
        return self._result.get()


class Staging:
    """Memory of the host for the pieces that this rank saves; one save at a time."""

    def __init__(self, pinned: bool, device: Device) -> None:
        self.device = device
        self.pinned = pinned and device.type == "cuda"
        self._memory: list[Tensor] = []
        self._pieces: Pieces = []
        self._copies: Callable[[], Copies] | None = None
        self._release: Callable[[], None] | None = None
        self.waited = 0.0
        """Seconds, in all saves."""

    def begin(self, pieces: Pieces) -> None:
        """Begin to copy."""
        self._pieces = pieces
        if [(m.shape, m.dtype) for m in self._memory] != [(t.shape, t.dtype) for _, t in pieces]:
            self._memory = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=self.pinned) for _, t in pieces
            ]
        if self.device.type == "cpu":
            task = Task(lambda: self._copy(pieces))
            self._copies, self._release = task.result, task.wait
        else:
            with self.device.beside() as copied:
                copies = self._copy(pieces)
            ready = Task(lambda: after(copied, copies, self.device))
            self._copies, self._release = ready.result, copied.wait

    def _copy(self, pieces: Pieces) -> Copies:
        copies = []
        for memory, (_, tensor) in zip(self._memory, pieces, strict=True):
            found = digest(tensor)
            copies.append((memory.copy_(tensor, non_blocking=self.pinned), found))
        return copies

    def copies(self) -> Pieces:
        """Wait for the copies: the pieces as they were when `begin` was called."""
        assert self._copies is not None
        self.device.make_current()  # a thread has the first one, and would make a context there
        return [
            (piece._replace(digest=int(found.item())), copy)
            for (piece, _), (copy, found) in zip(self._pieces, self._copies(), strict=True)
        ]

    @property
    def is_under_way(self) -> bool:
        """Whether `wait` was not called since `begin`."""
        return self._release is not None

    def wait(self) -> None:
        """Return when weights may change again; a device waits without its host."""
        if self._release is not None:
            began = time.perf_counter()
            self._release()
            self._release = None
            self.waited += time.perf_counter() - began


def after(event: torch.Event, copies: Copies, device: Device) -> Copies:
    """Wait on the device of this rank, in a thread, until an event is reached: the copies."""
    device.make_current()
    event.synchronize()
    return copies
