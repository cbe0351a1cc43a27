"""Stops a run at the end of a step when the user or the scheduler asks, and says so by its status.

A scheduler that takes a machine back sends a signal first. The run then saves, and ends with a
status that means "start me again"; see `ExitCode` for all of them.

The time of a save is compared with the grace period, from a request to stop until SIGKILL. Only the
scheduler knows this period, so its manifest puts it into a variable. If a save takes longer, the
run will resume from an earlier one, and its log should say so.
"""

import ctypes
import logging
import math
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import Any, Self

from torchtitan.config import ConfigError
from torchtitan.logging import logger
from torchtitan.resilience.exit_codes import ExitCode

# What Linux sends for each thread of a launcher that is gone, where that was asked for.
ORPHANED = signal.SIGUSR2
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# Ctrl-C; what schedulers send before they kill; what Slurm sends with --signal=USR1; what a closed
# terminal sends. SIGPROF is `torchtitan.profiling`'s, and stops nothing.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, ORPHANED)
# Signals that may come twice for one reason: both a shell and the system send SIGHUP.
REPEATED = (signal.SIGHUP, ORPHANED)

IS_LAST = ContextVar("IS_LAST", default=False)
"""Whether this process ends after its run; from the end of one that did not fail, it then ignores
requests to stop, as all is saved."""


def status_of_stop(by: signal.Signals | None, is_saved: bool) -> int:
    """The exit status of a run that was stopped before its last step; `by` is None elsewhere."""
    if not is_saved:
        return ExitCode.FAILED
    is_requeued = by in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    return ExitCode.REQUEUE if is_requeued else ExitCode.FINISHED


def handled(signals: Iterable[signal.Signals] = SIGNALS) -> list[signal.Signals]:
    """Return the requests to stop, without a SIGHUP that is to be ignored, as under `nohup`."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in signals if not (is_ignored and number == signal.SIGHUP)]


def stop_without_launcher() -> None:
    """Let the end of the process that started this one be a request to stop (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ORPHANED)


class StopSignal:
    """While entered, the first signal of a kind is a request, and the second acts at once.

    One rank's request is no decision: all ranks agree on it with each step.
    """

    def __init__(
        self, at_request: Callable[[], None] | None = None, grace: float | None = None
    ) -> None:
        """
        Args:
            at_request: called at the first signal.
            grace: seconds between the signal and SIGKILL; None: unknown.
        """
        self.at_request, self.grace = at_request, grace
        self.outlook: Callable[[], tuple[int, str]] | None = None
        """Level and text of a message about the save that follows; None: nothing is saved."""
        self.by: signal.Signals | None = None
        """The first signal."""
        self.is_agreed = False
        """Whether all ranks stop."""
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run should stop."""
        return self.by is not None

    def agree(self, is_requested: float) -> None:
        """All ranks know whether one of them was asked."""
        self.is_agreed = bool(is_requested)

    def __enter__(self) -> Self:
        for number in handled():
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            if IS_LAST.get() and error is None:
                signal.signal(number, signal.SIG_IGN)
                continue
            # The second form of a request (see `_request`) may come when all is saved; the default
            # would then end the process with a status that says that nothing is.
            is_awaited = self.requested and signal.getsignal(number) == self._request
            if not is_awaited or number == signal.SIGINT:
                signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if self.by is None:
            self.by = received
            saves = "then saving" if self.outlook else "but nothing is saved: see [checkpoint]"
            again = "" if received in REPEATED else "; send it again to stop immediately"
            logger.info("%s: finishing this step, %s%s", received.name, saves, again)
            if self.outlook is not None:
                logger.log(*self.outlook())
            if self.at_request is not None:
                self.at_request()
        # A scheduler may signal all processes of a job, and the launcher passes on what it got: so
        # one request may come as two signals, but never twice as the same one.
        if received not in REPEATED:
            signal.signal(number, self._previous[received])


VARIABLE = "TORCHTITAN_GRACE_SECONDS"
SAVED_BYTES = 12
"""Bytes saved for a parameter: its weight and the two moments of Adam in float32."""
WRITTEN_PER_SECOND = 1e9
"""Bytes that a node is expected to write per second."""


def read_grace(environment: Mapping[str, str]) -> float | None:
    """Return the seconds between a request to stop and SIGKILL; None: unknown.

    Raises:
        ConfigError: if the variable is not a number above 0.
    """
    word = environment.get(VARIABLE)
    if not word:
        return None
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ConfigError(f"{VARIABLE}: got {word}; wanted a number of seconds > 0")
    return seconds


def planned_seconds(parameters: int, nodes: int) -> float:
    """Return the seconds that nodes are expected to take to save a model."""
    return SAVED_BYTES * parameters / nodes / WRITTEN_PER_SECOND


def outlook(
    took: float | None, planned: float, saved_step: int | None, grace: float | None
) -> tuple[int, str]:
    """Return the level and the text of a message about the save that follows a request to stop.

    Args:
        took: seconds of the last save; None: there was none.
        planned: seconds that it is expected to take.
        saved_step: step of the newest finished save, if any.
        grace: seconds until SIGKILL; None: unknown.
    """
    seconds = planned if took is None else took
    says = "a save is expected to take" if took is None else "the last save took"
    if grace is None or seconds <= grace:
        newest = f"the newest is of step {saved_step}" if saved_step else "none is finished yet"
        return logging.INFO, f"{says} {seconds:.3g} s; {newest}"
    resumes = f"resumes from step {saved_step}, the newest save" if saved_step else "starts over"
    return logging.WARNING, (
        f"{says} {seconds:.3g} s, but the run may be killed after {grace:g} s ({VARIABLE}); if it "
        f"is, it {resumes}"
    )
