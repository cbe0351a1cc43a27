"""Work on documents in several processes."""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

from torchtitan.config import ConfigError


@contextmanager
def process_pool(
    processes: int, prepare: Callable[..., Any] | None = None, *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """Open a pool of forked processes; at the end of the block their work is abandoned.

    Ctrl-C reaches this process alone, and they end with it, however it ends.

    Args:
        prepare: called in each process with `arguments`, which are inherited and not pickled.

    Raises:
        ConfigError: if a process is killed.
    """
    others, own = set(active_children()), set[BaseProcess]()
    start = (os.getpid(), prepare, arguments)
    with ProcessPoolExecutor(processes, get_context("fork"), _start, start) as pool:
        try:
            unmasked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                pool.submit(os.getpid)  # starts all processes
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, unmasked)
                own = set(active_children()) - others
            yield pool
        except BrokenProcessPool:
            raise ConfigError(
                "a process was ended, perhaps for lack of memory; run the same command again with "
                "fewer processes"
            ) from None
        finally:
            for process in own:
                process.kill()
            pool.shutdown(cancel_futures=True)


def _start(parent: int, prepare: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # garbage of the parent may hold threads that a fork does not have
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    if prepare:
        prepare(*arguments)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
