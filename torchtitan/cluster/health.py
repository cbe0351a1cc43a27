"""The state of a running job over HTTP: `/healthz` for probes, `/metrics` for Prometheus.

A thread answers with what the training thread has noted, and the last report; to ask waits for no
device and no other rank. Text format:
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from torchtitan.logging import logger
from torchtitan.metrics import parse_address
from torchtitan.metrics.sinks import Metrics
from torchtitan.timeline import Timeline

LIMIT_IN_STEPS = 10.0
"""Age of the last step that is too old, in steps as long as the last."""
NOT_FINITE = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
Row = tuple[str, str, str, float | None]
"""Name, type, help and value of a metric."""


class Health:
    """State of a run as HTTP requests see it, and the sink of its reports."""

    def __init__(
        self, limit_seconds: float, restarts: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Show that the run is starting, until `watch`.

        Args:
            limit_seconds: time without a step that is too long, unless steps are long.
            restarts: number of restarts of the ranks so far.
        """
        self.limit_seconds, self.restarts, self.clock = limit_seconds, restarts, clock
        self.unit, self.rate = "tokens", "tps"
        self.total_steps: int | None = None
        self.timeline: Timeline | None = None
        self.values: dict[str, Any] = {}
        self.skipped = 0.0
        self.step = 0
        self.step_seconds = 0.0
        self.stepped = clock()
        self.has_stepped = False
        self.saved: tuple[int | None, float] = (None, clock())

    def watch(
        self,
        timeline: Timeline,
        *,
        unit: str,
        rate: str,
        total_steps: int,
        saved_step: Callable[[], int | None],
        is_finished: Callable[[], bool],
    ) -> None:
        """Watch a run that is being built; `unit` and `rate` are those of the task.

        Args:
            saved_step: the step of the newest checkpoint of this process, if any.
        """
        self.unit, self.rate, self.total_steps = unit, rate, total_steps
        self.saved_step, self.is_finished = saved_step, is_finished
        self.timeline = timeline

    def open(self, start_step: int) -> None:
        """Take the step that the run continues from."""
        self.step = start_step

    def write(self, step: int, metrics: Metrics) -> None:
        """Take the values of a report."""
        self.skipped += float(metrics.get("skipped") or 0)
        numbers = {k: v for k, v in metrics.items() if isinstance(v, (int, float))}
        self.values = self.values | numbers  # a new one, as the server reads it

    def close(self, summary: Metrics) -> None:
        """Keep the last values, as a scrape may still come."""

    def after_step(self, step: int) -> None:
        """Note that a step was done."""
        now = self.clock()
        self.step_seconds = now - self.stepped if self.has_stepped else 0.0
        self.step, self.stepped, self.has_stepped = step, now, True
        if self.saved_step() != self.saved[0]:
            self.saved = self.saved_step(), now

    def phase(self) -> str:
        """Return the activity of the run: only in `training` are steps expected."""
        if self.timeline is None:
            return "starting"
        if paused := self.timeline.paused_in:
            return paused
        if self.is_finished():
            return "finishing"
        return "training" if self.has_stepped else "starting"

    def health(self) -> dict[str, Any]:
        """Return the answer of `/healthz`."""
        now, phase = self.clock(), self.phase()
        # The step after a pause has all of its time.
        resumed = self.timeline.resumed if self.timeline else 0.0
        limit = max(self.limit_seconds, LIMIT_IN_STEPS * self.step_seconds)
        return {
            "healthy": phase != "training" or now - max(self.stepped, resumed) <= limit,
            "phase": phase,
            "step": self.step,
            "age_seconds": round(now - self.stepped, 3),
            "limit_seconds": round(limit, 3),
        }

    def rows(self) -> list[Row]:
        """Return all metrics."""
        now, last = self.clock(), self.values.get
        step, saved_at = self.saved

        return [
            ("step", "gauge", "Last completed step.", self.step),
            ("steps_wanted", "gauge", "Step at which the run ends.", self.total_steps),
            ("step_age_seconds", "gauge", "Time since the last step.", now - self.stepped),
            ("loss", "gauge", "Loss.", last("loss")),
            ("validation_loss", "gauge", "Loss of the last validation.", last("validation_loss")),
            ("grad_norm", "gauge", "Norm of the gradients before clipping.", last("grad_norm")),
            ("learning_rate", "gauge", "Learning rate.", last("lr")),
            (f"{self.unit}_total", "counter", f"Trained {self.unit}.", last(self.unit)),
            (
                f"{self.unit}_per_second_per_device",
                "gauge",
                f"{self.unit.capitalize()} per second and device.",
                last(self.rate),
            ),
            ("mfu", "gauge", "Model FLOPs utilization, 0 to 1.", last("mfu")),
            ("memory_peak_gib", "gauge", "Peak of the fullest rank.", last("memory_gib")),
            ("skipped_steps_total", "counter", "Steps without an update.", self.skipped),
            ("restarts_total", "counter", "Restarts of all ranks.", self.restarts),
            ("checkpoint_step", "gauge", "Step of the newest checkpoint.", step),
            (
                "checkpoint_age_seconds",
                "gauge",
                "Time since a checkpoint, or since the start.",
                now - saved_at,
            ),
        ]

    def text(self) -> str:
        """Return the answer of `/metrics`."""
        lines = []
        for name, kind, about, value in self.rows():
            if value is None:
                continue
            full, shown = f"torchtitan_{name}", NOT_FINITE.get(str(value), value)
            lines += [f"# HELP {full} {about}", f"# TYPE {full} {kind}", f"{full} {shown}"]
        return "\n".join(lines) + "\n"

    def answer(self, path: str) -> tuple[int, bytes, str]:
        """Return status, body and content type of a request."""
        if path == "/healthz":
            found: Mapping[str, Any] = self.health()
            status = 200 if found["healthy"] else 503
            return status, json.dumps(found).encode() + b"\n", "application/json"
        if path == "/metrics":
            return 200, self.text().encode(), "text/plain; version=0.0.4; charset=utf-8"
        return 404, b"there are /healthz and /metrics\n", "text/plain"


@contextmanager
def open_health(serve: str, timeout_seconds: float, restarts: int) -> Iterator[Health]:
    """Answer requests about a run at the address of `[metrics] serve`.

    Args:
        timeout_seconds: time after which a rank that hangs is ended.

    Raises:
        OSError: if the address cannot be served.
    """
    # A rank that hangs is reported and restarted after the timeout, which a probe is to leave time.
    health = Health(2.0 * timeout_seconds, restarts)

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0
        """Seconds until a client that sends nothing is left."""

        def do_GET(self) -> None:
            status, body, kind = health.answer(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: probes come every few seconds."""

    # An HTTPServer would look up its own name, which may take long.
    class Server(ThreadingTCPServer):
        # A restarted run need not wait for connections of the last one to time out.
        allow_reuse_address = daemon_threads = True
        address_family = socket.AF_INET6 if "[" in serve else socket.AF_INET

        def handle_error(self, request: Any, client_address: Any) -> None:
            logger.debug("metrics.serve: %s was not answered", client_address, exc_info=True)

    with Server(parse_address(serve), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield health
        finally:
            server.shutdown()
