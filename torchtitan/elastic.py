"""Stops a run at the end of a step when the user or the scheduler asks."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from torchtitan.logging import logger

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """While entered, the first Ctrl-C or SIGTERM is a request and the second acts at once.

    One rank's request is no decision: the trainer lets all ranks agree after each step.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        name = signal.Signals(number).name
        logger.info("%s: finishing this step, then saving; once more to stop at once", name)
        # A launcher passes on the Ctrl-C that the terminal sent to every process already, so the
        # same request comes as two different signals.
        signal.signal(number, self._previous[signal.Signals(number)])
