"""Copies the tensors of a save, so that training can continue while they are written.

The weights of a step do not change until the next step's update, so they are copied during its
forward and backward; only the update has to wait, and only if it comes first. On CUDA the device
copies, on a stream of its own; on a CPU a thread does. Tensors are released when they are copied,
and copies when they are written. Pinned memory returns to torch's cache, from which the next save
takes it: pinning memory takes longer than copying into it.
"""

import time
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Generic, TypeVar

import torch
from torch import Tensor

from torchtitan.checkpoint.storage import Piece
from torchtitan.device import Device
from torchtitan.digest import digest, unsigned

T = TypeVar("T")
Pieces = list[tuple[Piece, Tensor]]
Copies = list[tuple[Piece, Tensor, Tensor]]
"""Pieces with their copies and digests."""


class SaveThread(Generic[T]):
    """Work on a thread of its own, which does not keep a failing process alive."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.seconds = 0.0
        pool = ThreadPool(1)
        # Not an attribute: the work's references are released when it has ended.
        self._result = pool.apply_async(self._run, (work,))
        pool.close()

    def _run(self, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        value = work()
        self.seconds = time.perf_counter() - began
        return value

    def wait(self) -> None:
        """Wait until the work has ended, with a result or an error."""
        self._result.wait()

    @property
    def is_done(self) -> bool:
        return self._result.ready()

    def result(self) -> T:
        """Wait for the work; return its result, or raise its error."""
        return self._result.get()


class Staging:
    """Copies of this rank's pieces in host memory; one save at a time."""

    def __init__(self, pinned: bool, device: Device) -> None:
        self.device = device
        self.pinned = pinned and device.type == "cuda"
        self._release: Callable[[], None] | None = None
        self.waited = 0.0
        """Seconds spent waiting, over all saves."""

    def begin(self, pieces: Pieces) -> Callable[[], Pieces]:
        """Start copying the pieces' current values; return a function that waits for the copies."""
        if self.device.type == "cpu":
            copying = SaveThread(lambda: self._copy(pieces))
            self._release = copying.wait
        else:
            with self.device.side_stream() as copied:
                copies = self._copy(pieces)
            # The memory of the pieces must not be reused before they are copied.
            copying = SaveThread(lambda: after(copied, copies, self.device, pieces))
            self._release = copied.wait

        def collect() -> Pieces:
            # A new thread uses the first device, and would create a context there.
            self.device.make_current()
            return [
                (piece._replace(digest=unsigned(int(found.item()))), copy)
                for piece, copy, found in copying.result()
            ]

        return collect

    def _copy(self, pieces: Pieces) -> Copies:
        copies = []
        for piece, tensor in pieces:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pinned)
            found = digest(tensor, piece.offsets)
            copies.append((piece, memory.copy_(tensor, non_blocking=self.pinned), found))
        return copies

    @property
    def is_under_way(self) -> bool:
        """Whether `wait` was not called since `begin`."""
        return self._release is not None

    def wait(self) -> None:
        """Wait until weights may change again; a device waits without blocking its host."""
        if self._release is not None:
            began = time.perf_counter()
            self._release()
            self._release = None
            self.waited += time.perf_counter() - began


def after(event: torch.Event, copies: Copies, device: Device, _copied: Pieces) -> Copies:
    """Wait in a thread, on this rank's device, for an event; return the copies."""
    device.make_current()
    event.synchronize()
    return copies
