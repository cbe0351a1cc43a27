"""The runs of a comparison: starts them one after the other, as a user would, and reads them.

The outcome of each run is stored next to its folder. A finished run is kept as long as nothing
changed that its numbers depend on; an interrupted one is repeated from the start, since half a run
says nothing about speed.
"""

import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchtitan.config import has_wing
from torchtitan.logging import logger
from torchtitan.provenance import write_whole
from torchtitan.resilience.stop import handled
from torchtitan.tools.compare.results import FinishedRun, RunCurve, Spread
from torchtitan.tools.compare.study import PlannedRun, write_recipe
from torchtitan.tools.history import RunHistory, seconds_of
from torchtitan.tools.profile import read_trace

TERMINATE_TIMEOUT = 10.0
"""Seconds in which a run that is asked to end should have ended."""

LAST_LINES = 6
"""Lines of the log that are shown for a failed run."""

NOT_RECORDED = "the run did not record its collectives (comm.trace_buf_size, save_events)"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    key: str
    status: int
    launched: float
    """Unix seconds."""
    seconds: float
    last_lines: tuple[str, ...] = ()


@contextmanager
def terminable() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C inside the block, so that the current run ends too."""
    numbers = handled((signal.SIGTERM, signal.SIGHUP))
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launch_all(tasks: Sequence[PlannedRun]) -> None:
    """Start every missing run; a variant that fails is not tried again."""
    ours = [task for task in tasks if not is_done(task)]
    if len(ours) < len(tasks):
        logger.info("%d of %d runs are already finished", len(tasks) - len(ours), len(tasks))
    failed: set[str] = set()
    begin = time.monotonic()
    for number, task in enumerate(ours):
        if task.ready.name in failed:
            continue
        left = ""
        if number:
            seconds = (time.monotonic() - begin) / number * (len(ours) - number)
            left = f", about {timedelta(seconds=round(seconds))} left"
        name = f"{task.ready.name}, {task.folder.name}"
        logger.info("run %d of %d: %s%s", number + 1, len(ours), name, left)
        outcome = launch(task)
        if outcome.status:
            failed.add(task.ready.name)
            logger.error("%s: it ended with status %d: %s", name, outcome.status, log_of(task))
            for line in outcome.last_lines:
                logger.error("  %s", line)


def launch(task: PlannedRun) -> Outcome:
    """Start one run from the beginning, and write its outcome."""
    set_aside(task.folder)
    outcome_file(task.folder).unlink(missing_ok=True)
    recipe = write_recipe(task)
    # A run that dies and starts again tells nothing about speed.
    ranks = str(task.ready.plan.ranks)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    launcher += ["-m", "torchtitan.train"]
    if has_wing("cluster"):
        launcher = ["torchtitan", "train", "--max-restarts", "0", "--processes", ranks]
    command = [sys.executable, "-m", *launcher, "--job.config_file", str(recipe)]
    launched = time.time()
    with log_of(task).open("wb") as log:
        status = _run(command, log.fileno())
    seconds = time.time() - launched
    lines = log_of(task).read_text(encoding="utf-8", errors="replace").splitlines()
    last = tuple(lines[-LAST_LINES:]) if status else ()
    outcome = Outcome(task.key, status, launched, seconds, last)
    write_whole(outcome_file(task.folder), json.dumps(asdict(outcome), indent=1))
    return outcome


def _run(command: Sequence[str], output: int) -> int:
    """Run a command, which ends with this process in any case, and return its status."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            # It is made again from the start, so nothing of it need be saved.
            for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
                process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TERMINATE_TIMEOUT)
                    break


def is_done(task: PlannedRun) -> bool:
    """Whether a run finished, and nothing changed that its numbers depend on."""
    outcome = read_outcome(task.folder)
    return outcome is not None and outcome.status == 0 and outcome.key == task.key


def read_outcome(folder: Path) -> Outcome | None:
    """Read the outcome of the run of a folder; None if there is none."""
    path = outcome_file(folder)
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return Outcome(**found | {"last_lines": tuple(found["last_lines"])})


def outcome_file(folder: Path) -> Path:
    """The path of the outcome of the run of a folder."""
    return folder.with_name(f"{folder.name}.outcome.json")


def log_of(task: PlannedRun) -> Path:
    """The path of the output of a run."""
    return task.folder.with_name(f"{task.folder.name}.log")


def set_aside(folder: Path) -> None:
    """Rename the existing folder of a run; nothing is deleted."""
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    folder.rename(aside)
    logger.info("%s: of an earlier study or an interrupted run, renamed %s", folder, aside.name)


def spread(values: Sequence[float]) -> Spread | None:
    """Compute median, quartiles (by linear interpolation) and extremes; None without values."""
    if not values:
        return None
    several = values if len(values) > 1 else [*values, *values]
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return Spread(middle, low, high, min(values), max(values), len(values))


class MeasuredRun:
    """A finished run: its numbers in the steps that are measured."""

    def __init__(self, folder: Path, round: int, seed: int, warmup: int, last: int | None) -> None:
        """The measured steps are those after `warmup`, up to `last` (None: to the end)."""
        self.folder, self.round, self.seed, self.warmup = folder, round, seed, warmup
        self.history = RunHistory.open(folder)
        self.last = math.inf if last is None else last
        self.all = [row for row in self.history.reports if row["step"] <= self.last]
        self.rows = [row for row in self.all if row["step"] > warmup]
        self.tps: list[float] = [row["tps"] for row in self.rows if row["tps"]]
        """Units per second and device in each row."""
        self.step_seconds: list[float] = [r["step_time"] for r in self.rows if r["step_time"]]
        """Seconds per step in each row."""
        self.mfu: list[float] = [row["mfu"] for row in self.rows if row["mfu"] is not None]
        """MFU in each row, if the peak of the device is known."""
        self.memory_gib: float | None = max((row["memory_gib"] for row in self.all), default=None)
        """Peak memory of the worst rank over the whole run."""
        start = self.history.last_event("start")
        self.compile_s: float | None = start.get("compile_s") or None
        """Seconds in the compiler until the end of the first step; None if nothing is compiled."""
        self.state_bytes: int | None = start.get("state_bytes")
        """Bytes of optimizer states of rank 0 after the first step; None if unknown."""
        traffic = self.history.last_event("traffic")
        self.has_messages = bool(traffic.get("messages"))
        """Whether sends and receives were recorded, which gloo does not do."""
        self.collectives: list[dict[str, Any]] = traffic.get("collectives", [])
        """Collectives of a step of rank 0, by axis and operation, with the bytes that it sends."""
        self.sent = self.history.sent
        """Bytes that rank 0 sends in a step, by axis."""
        self.left_out: str = traffic.get("left_out", "") if traffic else NOT_RECORDED
        """The reason why `sent` is empty or incomplete, if it is."""

    @property
    def startup_s(self) -> float | None:
        """Seconds to the end of the first step, from the launch or else the process start."""
        outcome = read_outcome(self.folder)
        if outcome is not None and self.all:
            seconds: float = self.all[0]["time"] - outcome.launched
            return seconds
        start = self.history.last_event("start")
        parts = [start.get("before_first_step_s"), start.get("first_step_s")]
        return sum(parts) if all(part is not None for part in parts) else None  # type: ignore[arg-type]

    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds of all measured steps by phase, pauses included."""
        phases, pauses = seconds_of(
            (row, steps)
            for row, steps in self.history.report_steps()
            if self.warmup < row["step"] <= self.last
        )
        return phases | pauses if phases else {}

    def curve(self, key: str) -> RunCurve:
        """A value over all steps, including those that are not measured."""
        values: list[float | None] = [row[key] for row in self.all]
        return RunCurve(
            tuple(row["step"] for row in self.all),
            tuple(row["tokens"] for row in self.all),
            tuple(value if math.isfinite(value or 0) else None for value in values),
        )

    @property
    def experts(self) -> dict[str, float]:
        """Balance of experts in the last report, by name; empty without experts."""
        prefix, last = "experts/", self.all[-1] if self.all else {}
        return {k.removeprefix(prefix): v for k, v in last.items() if k.startswith(prefix)}

    @property
    def exposed(self) -> float | None:
        """Share of a traced step in which rank 0 communicated without computing."""
        path = self.history.newest_trace().get(0)
        if path is None:
            return None
        trace = read_trace(path)
        return trace.exposed / trace.span if trace.span else None

    def summary(self, root: Path) -> FinishedRun:
        """The entry of this run in the report; folders are relative to `root`."""
        inside = self.folder.is_relative_to(root)
        folder = self.folder.relative_to(root) if inside else self.folder
        return FinishedRun(str(folder), self.round, self.seed, spread(self.tps), self.startup_s)
