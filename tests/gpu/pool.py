"""Workers that share the cases of a stage; one that dies or takes too long is replaced."""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

NOT_RUN = "not run: the time was up"


class Result(NamedTuple):
    """What became of a case; `left out` among its figures says why it was not tried."""

    case: str
    error: str | None
    figures: dict[str, Any]
    seconds: float
    traceback: str = ""


class Worker:
    """A process of tests.gpu.worker."""

    def __init__(self, arguments, log):
        self.log = open(log, "a")  # noqa: SIM115
        mine, theirs = os.pipe()
        self.answers = mine
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.worker", *arguments, str(theirs)],
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
            pass_fds=[theirs],
            text=True,
            start_new_session=True,
        )
        os.close(theirs)

    def ask(self, case, limit):
        begin = time.monotonic()
        try:
            self.process.stdin.write(f"{case}\n")
            self.process.stdin.flush()
            said = b""
            while not said.endswith(b"\n"):
                left = begin + limit - time.monotonic()
                if left <= 0 or not select.select([self.answers], [], [], left)[0]:
                    return self._gone(case, f"took more than {limit:.0f} s", begin)
                if not (part := os.read(self.answers, 1 << 16)):
                    return self._gone(case, f"the process ended: {self.process.wait()}", begin)
                said += part
        except BrokenPipeError:
            return self._gone(case, f"the process ended: {self.process.wait()}", begin)
        answer = json.loads(said)
        if answer.get("ends"):
            self.close()
        return Result(
            case,
            answer.get("error"),
            answer.get("figures", {}),
            answer["seconds"],
            answer.get("traceback", ""),
        )

    def _gone(self, case, why, begin):
        self.close()
        return Result(case, why, {}, round(time.monotonic() - begin, 1))

    @property
    def alive(self):
        return self.process.poll() is None

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(cases, arguments, *, workers, limit, until, log, tell):
    """Check all `cases`, `workers` at once, each within `limit` seconds, until that moment."""
    waiting = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    lock = threading.Lock()

    def work():
        worker = None
        while True:
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                break
            left = until - time.monotonic()
            if left < 5:
                result = Result(case, NOT_RUN, {}, 0.0)
            else:
                if worker is None or not worker.alive:
                    worker = Worker(arguments, log)
                result = worker.ask(case, min(limit, left))
                if not worker.alive and time.monotonic() >= until - 1:
                    result = result._replace(error=NOT_RUN)
            with lock:
                tell(result)
        if worker:
            worker.close()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
