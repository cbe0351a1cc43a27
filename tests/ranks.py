"""Runs a function on several ranks of one machine: forked for gloo, spawned for NCCL.

A fork starts in milliseconds because torch is imported already, and a store in a file needs no
port. CUDA cannot be used after a fork, so NCCL ranks pay for an import each.
"""

import gc
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Result = TypeVar("Result")
TIMEOUT = timedelta(seconds=120)


def run_ranks(
    function: Callable[..., Result], world: int, *args: Any, device: str = "cpu"
) -> list[Result]:
    """`function(*args)` on `world` ranks with a process group; the results in rank order.

    Raises:
        AssertionError: with the tracebacks of the ranks that failed.
    """
    context = mp.get_context("fork" if device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            context.Process(
                target=_rank, args=(rank, world, folder, device, function, args), daemon=True
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        # A rank that fails leaves the others waiting for it, so they are not waited for.
        while None in (codes := [process.exitcode for process in ranks]) and not any(codes):
            wait([ranks[rank].sentinel for rank, code in enumerate(codes) if code is None], 0.1)
        for process in ranks:
            if process.exitcode is None:
                process.kill()
            process.join()
        failures = [
            f"rank {rank} ended with status {code}:\n{_read(folder / f'{rank}.error')}"
            for rank, code in enumerate(codes)
            if code
        ]
        assert not failures, "\n".join(failures)
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world)]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else "it left no traceback"


def _rank(
    rank: int,
    world: int,
    folder: Path,
    device: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # Garbage of the parent may hold threads that a fork does not have; never collect it here.
    gc.freeze()
    # Make torch 2.11 replace the parent's thread pool now; its autograd threads race to do it.
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    status = 1
    try:
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.FileStore(str(folder / "store"), world),
            rank=rank,
            world_size=world,
            timeout=TIMEOUT,
        )
        (folder / f"{rank}.result").write_bytes(pickle.dumps(function(*args)))
        dist.destroy_process_group()
        status = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        # Skips the exit handlers of pytest, which belong to the parent.
        os._exit(status)
