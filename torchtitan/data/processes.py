"""Work on documents in other processes."""

import gc
import os
import pickle
import signal
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import Pipe, active_children, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, NoReturn

import torch

from torchtitan.config import ConfigError, Unreachable


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
            try:
                with _blocked({signal.SIGINT}):
                    pool.submit(os.getpid)  # starts all processes
            finally:
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


class ForkedCalls:
    """Results of a function that a forked process calls again and again, ahead of its caller.

    It is ahead by one call, and by what a socket holds. The process ends with this object, and with
    this process. It gets no signal but SIGKILL, as its handlers are those of the run.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._results, results = Pipe()  # of sockets, which hold more than the 64 KiB of a pipe
        parent, self._status = os.getpid(), 0
        with _blocked(signal.valid_signals()):
            self.pid = os.fork()  # `Process` refuses to start in a daemon, such as a local rank
            if not self.pid:
                _serve(parent, call, results)
        results.close()
        self._end = weakref.finalize(self, _kill, self.pid)

    def __call__(self) -> Any:
        """Return the next result.

        Raises:
            Unreachable: if the process was ended.
        """
        try:
            return pickle.loads(self._results.recv_bytes())
        except (EOFError, OSError):
            if self._end.alive:
                self._status = self._end() or 0
        why = f"with status {self._status}; its error is above"
        if self._status < 0:
            why = f"by signal {-self._status}, perhaps for lack of memory; lower data.num_workers"
        raise Unreachable(f"process {self.pid}, which prepares samples, was ended {why}")


def _serve(parent: int, call: Callable[[], Any], results: Connection) -> NoReturn:
    try:
        _start(parent, torch.set_num_threads, (1,))  # others of OpenMP are not there after a fork
        while True:
            results.send_bytes(pickle.dumps(call(), pickle.HIGHEST_PROTOCOL))
    finally:
        traceback.print_exc()
        os._exit(1)


def _kill(pid: int) -> int:
    """Kill a child, and return its status; if it has ended before, that of then."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def _blocked(signals: Iterable[int]) -> Iterator[None]:
    """Block signals for processes that are forked within this context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(parent: int, prepare: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # garbage of the parent may hold threads that a fork does not have
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    if prepare:
        prepare(*arguments)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
