"""What the agent restarts, and what it does with signals, tried on shell commands as ranks.

Each trial has a process of its own, as torch's agent leaves handlers and open files behind.
"""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from tests.ranks import run_ranks
from torchtitan.resilience.agent import Agent, describe

HOPELESS = 3
RESTARTS = 2


def agent(script: str) -> tuple[Agent, list[str]]:
    """The agent of one rank that runs `script` in a shell, and a list of its failures."""
    words = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--rdzv_id=test", "--nnodes=1"]
    words += ["--nproc_per_node=1", f"--max-restarts={RESTARTS}", "--signals-to-handle=SIGQUIT"]
    words += ["--tee=3", "--no-python", "bash", "-c", script]
    failures: list[str] = []
    mine = Agent(
        words,
        not_restarted=[HOPELESS],
        is_finished=lambda: True,
        at_failure=lambda: failures.append("one"),
    )
    return mine, failures


def fails(script: str, restarts: int, message: str) -> None:
    mine, failures = agent(script)
    with pytest.raises(ChildFailedError) as failed:
        mine.work()
    assert len(failures) == restarts
    assert describe(failed.value.failures) == message


@pytest.mark.parametrize(
    ("script", "restarts", "message"),
    [
        ("exit 1", RESTARTS, "rank 0 exited with status 1"),
        ("kill -9 $BASHPID", RESTARTS, "rank 0 was killed by SIGKILL"),
        (f"exit {HOPELESS}", 0, "rank 0 exited with status 3"),
    ],
)
def test_restarts_what_a_restart_may_mend(script: str, restarts: int, message: str) -> None:
    run_ranks(fails, 1, script, restarts, message)


def heals() -> None:
    mine, failures = agent("[ $TORCHELASTIC_RESTART_COUNT = 1 ] || kill -9 $BASHPID")
    mine.work()
    assert failures == ["one"]


def test_second_start_may_end_well() -> None:
    run_ranks(heals, 1)


def signalled(mine: Agent, number: int, ready: Path, times: int = 1) -> None:
    """Let the agent work, and signal it when its rank is there."""

    def send() -> None:
        while not ready.exists():
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    threading.Thread(target=send).start()
    mine.work()


def waits(ready: Path, *traps: str) -> str:
    """A rank that goes on for ever, but for its traps."""
    return "; ".join([*traps, f"touch {ready}", "while :; do sleep 0.05; done"])


def saves(number: int, passed_on: str, ready: Path) -> None:
    before = signal.getsignal(number)
    mine, failures = agent(waits(ready, f"trap 'exit 0' {passed_on}"))
    signalled(mine, number, ready)
    assert (mine.stopped_by, mine.at_once, failures) == (number, False, [])
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("number", "passed_on"),
    [(signal.SIGTERM, "USR1"), (signal.SIGINT, "USR1"), (signal.SIGUSR1, "TERM")],
)
def test_signal_is_passed_on_as_another(number: int, passed_on: str, tmp_path: Path) -> None:
    run_ranks(saves, 1, number, passed_on, tmp_path / "ready")


def ends_at_once(ready: Path) -> None:
    mine, failures = agent(waits(ready, "trap '' TERM USR1"))
    with pytest.raises(SignalException) as ended:
        signalled(mine, signal.SIGTERM, ready, times=2)
    assert (ended.value.sigval, mine.at_once, failures) == (signal.SIGKILL, True, [])


def test_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    run_ranks(ends_at_once, 1, tmp_path / "ready")


def fails_to_save(ready: Path) -> None:
    mine, failures = agent(waits(ready, "trap 'exit 1' USR1"))
    with pytest.raises(ChildFailedError):
        signalled(mine, signal.SIGTERM, ready)
    assert failures == []


def test_rank_that_fails_while_it_is_stopped_is_not_started_again(tmp_path: Path) -> None:
    run_ranks(fails_to_save, 1, tmp_path / "ready")
