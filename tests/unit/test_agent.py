"""What the agent restarts, and what it does with signals, tried on shell commands as ranks.

Each trial has a process of its own, as torch's agent leaves handlers and open files behind.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from tests.ranks import run_ranks
from torchtitan.resilience import rendezvous
from torchtitan.resilience.agent import Agent, describe

HOPELESS = 3
RESTARTS = 2


def agent(
    script: str,
    endpoint: str = "localhost:0",
    nodes: int = 1,
    rejoin_seconds: float = 60,
    conf: str = "last_call_timeout=1",
    is_finished: bool = False,
) -> tuple[Agent, list[str]]:
    """The agent of one rank that runs `script` in a shell, and a list of its failures."""
    words = ["--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--rdzv_id=test"]
    words += [f"--nnodes={nodes}", f"--rdzv_conf={conf}"]
    words += ["--nproc_per_node=1", f"--max-restarts={RESTARTS}", "--signals-to-handle=SIGQUIT"]
    words += ["--tee=3", "--no-python", "bash", "-c", script]
    failures: list[str] = []
    mine = Agent(
        words,
        rejoin_seconds=rejoin_seconds,
        not_restarted=[HOPELESS],
        is_finished=lambda: is_finished or nodes == 1,
        at_failure=lambda: failures.append("one"),
    )
    return mine, failures


def fails(script: str, restarts: int, message: str) -> None:
    mine, failures = agent(script)
    with pytest.raises(ChildFailedError) as failed:
        mine.work()
    assert len(failures) == restarts
    assert describe(failed.value.failures) == message


@pytest.mark.gate
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


@contextmanager
def unused_port() -> Iterator[int]:
    """A port that refuses connections: it is bound, so no other process can listen to it."""
    with socket.socket() as held:
        held.bind(("localhost", 0))
        yield held.getsockname()[1]


def free_port() -> int:
    with unused_port() as port:
        return port


def finds_no_store(port: int) -> None:
    mine, _ = agent("true", f"localhost:{port}", 2, 1.5, "is_host=0")
    with pytest.raises(RendezvousConnectionError, match=r"cannot be reached: .*Connection refused"):
        mine.work()


def test_node_without_a_rendezvous_gives_up_at_its_limit() -> None:
    with unused_port() as port:
        run_ranks(finds_no_store, 1, port)


def finds_that_all_is_done(port: int) -> None:
    mine, _ = agent("true", f"localhost:{port}", 2, 600, "is_host=0", is_finished=True)
    with pytest.raises(RendezvousClosedError, match="the others finished without this node"):
        mine.work()


def test_node_does_not_wait_for_others_that_have_finished() -> None:
    with unused_port() as port:
        run_ranks(finds_that_all_is_done, 1, port)


def is_stopped_while_it_waits(port: int) -> None:
    mine, _ = agent("true", f"localhost:{port}", 2, 600, "is_host=0")
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    with pytest.raises(SignalException):
        mine.work()


def test_signal_ends_the_wait_for_the_rendezvous() -> None:
    with unused_port() as port:
        run_ranks(is_stopped_while_it_waits, 1, port)


def finds_nobody() -> None:
    rendezvous.ATTEMPT = 1
    mine, _ = agent("true", nodes=2, rejoin_seconds=1)
    with pytest.raises(RendezvousTimeoutError):
        mine.work()
    assert not mine.rendezvous.is_closed()


def test_node_that_gives_up_does_not_end_the_others() -> None:
    run_ranks(finds_nobody, 1)


def meets_late(port: int) -> None:
    """Rank 0 holds the rendezvous, and comes last."""
    is_host = dist.get_rank() == 0
    time.sleep(2.0 * is_host)
    mine, _ = agent("[ $WORLD_SIZE = 2 ]", f"127.0.0.2:{port}", 2, conf=f"is_host={is_host:d}")
    mine.work()


def test_nodes_meet_where_the_one_with_the_rendezvous_comes_last() -> None:
    run_ranks(meets_late, 2, free_port())


def trains_without_store(port: int) -> None:
    """Rank 0 only holds the store, and is frozen while the rank of the other's agent runs."""
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    rendezvous.CALL_TIMEOUT = 0.5
    if dist.get_rank() == 0:
        held = rendezvous.Store("127.0.0.2", port)
        held.check(["any"])
        dist.barrier()
    else:
        dist.barrier()
        threading.Timer(2.5, os.kill, [pids[0], signal.SIGCONT]).start()
        script = f"kill -STOP {pids[0]}; sleep 3"
        mine, failures = agent(script, f"127.0.0.2:{port}", conf="is_host=0")
        mine.work()
        assert failures == []
    dist.barrier()


@pytest.mark.gate
def test_ranks_go_on_while_the_rendezvous_is_out_of_reach() -> None:
    run_ranks(trains_without_store, 2, free_port())
