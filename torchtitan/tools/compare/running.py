"""Runs the tasks of a comparison one after the other, with the same launcher as a user would.

The outcome of each run is stored next to its folder. A finished run is kept as long as nothing
changed that its numbers depend on; an interrupted one is repeated from the start, since half a run
says nothing about speed.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from torchtitan.logging import logger
from torchtitan.resilience.stop import handled
from torchtitan.tools.compare.prepare import PlannedRun, write_recipe

TERMINATE_TIMEOUT = 10.0
"""Seconds in which a run that is asked to end should have ended."""

LAST_LINES = 6
"""Lines of the log that are shown for a failed run."""


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


def launch_all(tasks: Sequence[PlannedRun], launcher: str) -> None:
    """Start every missing run; a variant that fails is not tried again."""
    ours = [task for task in tasks if not is_done(task)]
    if len(ours) < len(tasks):
        logger.info("%d of %d runs are there already", len(tasks) - len(ours), len(tasks))
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
        outcome = launch(task, launcher)
        if outcome.status:
            failed.add(task.ready.name)
            logger.error("%s: it ended with status %d: %s", name, outcome.status, log_of(task))
            for line in outcome.last_lines:
                logger.error("  %s", line)


def launch(task: PlannedRun, launcher: str) -> Outcome:
    """Start one run from the beginning, and write its outcome."""
    set_aside(task.folder)
    outcome_file(task.folder).unlink(missing_ok=True)
    recipe = write_recipe(task)
    words = shlex.split(launcher.replace("{ranks}", str(task.ready.plan.ranks)))
    # A run that dies and starts again tells nothing about speed.
    local = [sys.executable, "-m", "torchtitan", "train", "--max-restarts", "0", "--processes"]
    local.append(str(task.ready.plan.ranks))
    command = [*(words or local), "--job.config_file", str(recipe)]
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


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: it exists completely or not at all."""
    unfinished = path.with_name(f"{path.name}.writing")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
