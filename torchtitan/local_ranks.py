"""Execution of a function on local ranks: forked for gloo, spawned for NCCL.

A fork starts in milliseconds because torch is imported already, and a store in a file needs no
port. CUDA cannot be used after a fork, so NCCL ranks pay for an import each.
"""

import faulthandler
import gc
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torchtitan.torch_private.compiler import forget_compiler_threads

Result = TypeVar("Result")
TIMEOUT = timedelta(seconds=120)


class RanksFailed(RuntimeError):
    """Error of one or more ranks, with the traceback of each in the message."""

    def __init__(self, message: str, codes: Sequence[int | None] = ()) -> None:
        """`codes`: exit codes of all ranks by then, negative for a signal, None while running."""
        super().__init__(message)
        self.codes = tuple(codes)


def run_ranks(
    function: Callable[..., Result],
    world: int,
    *args: Any,
    device: str = "cpu",
    timeout: timedelta = TIMEOUT,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Run `function(*args)` on `world` ranks with a process group; return results in rank order.

    Args:
        function: finds RANK, WORLD_SIZE and LOCAL_RANK in the environment, as under torchrun.
        timeout: limit for a collective of the group.
        meanwhile: called about ten times a second while the ranks work.

    Raises:
        RanksFailed: if any rank fails; the others are ended too.
    """
    context: Any = mp.get_context("fork" if device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            context.Process(
                target=_rank,
                args=(rank, world, folder, device, timeout, function, args),
                daemon=True,
            )
            for rank in range(world)
        ]
        try:
            for process in ranks:
                process.start()
            codes = _wait(ranks, meanwhile)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        failures = [
            f"rank {rank} ended with status {code}:\n{_read(folder / f'{rank}.error')}"
            for rank, code in enumerate(codes)
            if code
        ]
        if failures:
            raise RanksFailed("\n".join(failures), codes)
        results = (folder / f"{rank}.result" for rank in range(world))
        return [torch.load(path, weights_only=False) for path in results]


def _wait(ranks: Sequence[BaseProcess], meanwhile: Callable[[], None]) -> list[int | None]:
    """Wait for all ranks or the first failure; return their exit codes, None while running."""
    # A failed rank leaves the others waiting for it, so they are not waited for.
    while None in (codes := [process.exitcode for process in ranks]) and not any(codes):
        wait([ranks[rank].sentinel for rank, code in enumerate(codes) if code is None], 0.1)
        meanwhile()
    return codes


def _read(path: Path) -> str:
    return (path.read_text(encoding="utf-8") if path.exists() else "") or "it left no traceback"


def _rank(
    rank: int,
    world: int,
    folder: Path,
    device: str,
    timeout: timedelta,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    with ExitStack() as leaving:
        error = folder / f"{rank}.error"
        # After a fault in native code, the stacks of its threads are there.
        faulthandler.enable(leaving.enter_context(error.open("w", encoding="utf-8")))
        leaving.push(partial(_leave, error))
        # Garbage of the parent may hold threads that a fork does not have; never collect it here.
        gc.freeze()
        # Make torch 2.11 replace the parent's thread pool now; its autograd threads race to do it.
        torch.set_num_threads(1)
        forget_compiler_threads()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timeout,
        )
        # Of tensors, `pickle` takes several times as long to write and read one.
        torch.save(function(*args), folder / f"{rank}.result")
        # A rank that left while another still connects, to a group created last, would fail it. A
        # failed one is not waited for: `_wait` ends the others.
        store.set(f"done {rank}", "")
        store.wait([f"done {each}" for each in range(world)], timeout)
        dist.destroy_process_group()


def _leave(
    path: Path,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """End this process, without its parent's exit handlers, and report its error."""
    try:
        if error is not None:
            path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    finally:
        os._exit(error is not None)
