"""Reports progress to the TrainJob that a run is part of, as its `status.trainerStatus`.

Kubeflow Trainer since v2.2, with the feature gate TrainJobStatus, sets three variables in each
container: a URL, and the files of a certificate and of a token, which change over time. Requests
are made by a thread; a server that is slow or gone delays no step. Protocol:
https://github.com/kubeflow/trainer/blob/master/docs/user-guides/trainjob-progress.md
"""

import json
import ssl
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from torchtitan.logging import logger
from torchtitan.metrics.sinks import Metrics, SinkContext, rate_key, unit_of

PREFIX = "KUBEFLOW_TRAINER_SERVER_"
NAMES = ("URL", "CA_CERT", "TOKEN")
INTERVAL = 5.0
"""Least seconds between two requests, apart from the last one."""
TIMEOUT = 5.0
"""Seconds for a request, and for the last one to end."""
SHOWN = ("loss", "grad_norm", "lr", "mfu", "memory_gib")
"""Metrics of a row of steps that are reported."""
MOST_METRICS, LONGEST_NAME = 256, 64
"""Limits of a TrainJob."""


def is_trainjob(environment: Mapping[str, str]) -> bool:
    """Whether there is a TrainJob that wants reports."""
    return all(environment.get(f"{PREFIX}{name}") for name in NAMES)


class TrainJob:
    """Sink that sends the newest progress, at most every `INTERVAL` seconds."""

    def __init__(self, context: SinkContext, environment: Mapping[str, str]) -> None:
        self.total = context.total_steps
        self.url, certificate, token = (environment[f"{PREFIX}{name}"] for name in NAMES)
        self.certificate, self.token = Path(certificate), Path(token)
        self.metrics: dict[str, str] = {}
        self.seconds_left: float | None = None
        self._news: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._is_closed = self._has_failed = False
        self._thread = threading.Thread(target=self._report, daemon=True)

    def open(self, start_step: int) -> None:
        self._put(start_step)
        if not self._thread.is_alive():
            self._thread.start()

    def write(self, step: int, metrics: Metrics) -> None:
        if "event" in metrics:
            return
        shown: list[str] = list(metrics)
        if rate := rate_key(metrics):
            shown = [*SHOWN, unit_of(rate), rate]
        found = {name: metrics.get(name) for name in shown if len(name) <= LONGEST_NAME}
        numbers = {k: f"{v:.6g}" for k, v in found.items() if isinstance(v, float)}
        self.metrics |= numbers | {k: str(v) for k, v in found.items() if isinstance(v, int)}
        if isinstance(left := metrics.get("eta_s"), (int, float)):
            self.seconds_left = left
        self._put(step)

    def close(self, summary: Metrics) -> None:
        """Send the last progress, and wait for that, but not for long."""
        step = summary["step"]
        assert isinstance(step, int)
        if step >= self.total:
            self.seconds_left = 0
        self._put(step, is_last=True)
        if self._thread.is_alive():
            self._thread.join(TIMEOUT)

    def _put(self, step: int, is_last: bool = False) -> None:
        """Replace the progress to be sent next."""
        metrics = {"step": str(step)} | self.metrics
        status: dict[str, Any] = {
            "progressPercentage": min(100, 100 * step // self.total),
            "metrics": [{"name": name, "value": value} for name, value in metrics.items()],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        del status["metrics"][MOST_METRICS:]
        if self.seconds_left is not None:
            status["estimatedRemainingSeconds"] = min(round(self.seconds_left), 2**31 - 1)
        with self._changed:
            self._news, self._is_closed = status, is_last
            self._changed.notify()

    def _report(self) -> None:
        """Send news until the run ends."""
        sent = -INTERVAL
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._news)
                pause = sent + INTERVAL - time.monotonic()
                self._changed.wait_for(lambda: self._is_closed, max(pause, 0.0))
                news, self._news, is_last = self._news, None, self._is_closed
            sent = time.monotonic()
            try:
                self._send({"trainerStatus": news})
            except (OSError, ValueError, HTTPException) as error:
                if not self._has_failed:
                    message = "progress could not be reported to the TrainJob: %s; trying again"
                    logger.warning(message, error)
                self._has_failed = True
            if is_last:
                return

    def _send(self, body: Mapping[str, Any]) -> None:
        headers = {
            "Authorization": f"Bearer {self.token.read_text(encoding='utf-8').strip()}",
            "Content-Type": "application/json",
        }
        request = Request(self.url, json.dumps(body).encode(), headers, method="POST")
        trusted = ssl.create_default_context(cafile=self.certificate)
        with urlopen(request, timeout=TIMEOUT, context=trusted) as answer:
            answer.read()
