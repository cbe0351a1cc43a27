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
from pathlib import Path
from typing import Any, TypeVar

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
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        arguments = (world, Path(folder) / "store", device, results, function, args)
        ranks = [
            context.Process(target=_rank, args=(rank, *arguments), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        answers: dict[int, bytes] = {}
        failures = {}
        while len(answers) + len(failures) < world and not failures:
            rank, ok, value = results.get()
            (answers if ok else failures)[rank] = value
        for process in ranks:
            if failures:
                process.kill()
            process.join()
    assert not failures, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
    return [pickle.loads(answers[rank]) for rank in range(world)]


def _rank(
    rank: int,
    world: int,
    store: Path,
    device: str,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # Garbage of the parent may hold threads that a fork does not have; never collect it here.
    gc.freeze()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(store), world),
            rank=rank,
            world_size=world,
            timeout=TIMEOUT,
        )
        # As bytes: a tensor on a queue is shared memory, which would die with this process.
        results.put((rank, True, pickle.dumps(function(*args))))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        # Skips the exit handlers of pytest, which belong to the parent.
        os._exit(0)
