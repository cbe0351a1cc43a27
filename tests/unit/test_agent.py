"""What the agent restarts, and what it does with signals, tried on shell commands as ranks."""

import os
import signal
import socket
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)

from tests import forked
from tests.ranks import free_port, run_ranks
from torchtitan.cluster import rendezvous
from torchtitan.cluster.agent import Agent, describe

HOPELESS = 3
RESTARTS = 2


def agent(
    script,
    endpoint="localhost:0",
    nodes=1,
    rejoin_seconds=60,
    conf="last_call_timeout=1",
    is_finished=False,
):
    """The agent of one rank that runs `script` in a shell, and a list of its failures."""
    words = ["--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--rdzv_id=test"]
    words += [f"--nnodes={nodes}", f"--rdzv_conf={conf}"]
    words += ["--nproc_per_node=1", f"--max-restarts={RESTARTS}", "--signals-to-handle=SIGQUIT"]
    words += ["--tee=3", "--no-python", "bash", "-c", script]
    failures = []
    mine = Agent(
        words,
        rejoin_seconds=rejoin_seconds,
        not_restarted=[HOPELESS],
        is_finished=lambda: is_finished or nodes == 1,
        at_failure=lambda: failures.append("one"),
    )
    return mine, failures


def fails(script, how, restarts=RESTARTS):
    mine, failures = agent(script)
    with pytest.raises(ChildFailedError) as failed:
        mine.work()
    assert len(failures) == restarts
    assert describe(failed.value.failures) == f"rank 0 {how}"


def heals():
    mine, failures = agent("[ $TORCHELASTIC_RESTART_COUNT = 1 ] || kill -9 $BASHPID")
    mine.work()
    assert failures == ["one"]


def signalled(mine, number, ready, times=1):
    """Let the agent work, and signal it when its rank is there."""

    def send():
        while not ready.exists():
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), number)
            while mine.stopped_by is None:
                time.sleep(0.01)

    threading.Thread(target=send).start()
    mine.work()


def waits(ready, *traps):
    """A rank that goes on for ever, but for its traps."""
    return "; ".join([*traps, f"touch {ready}", "while :; do sleep 0.05; done"])


def saves(number, passed_on):
    before, ready = signal.getsignal(number), Path(f"ready-{passed_on}-{number}")
    mine, failures = agent(waits(ready, f"trap 'exit 0' {passed_on}"))
    signalled(mine, number, ready)
    assert (mine.stopped_by, mine.ended_by, failures) == (number, None, [])
    assert signal.getsignal(number) is before


def ends_at_once():
    mine, failures = agent(waits(Path("ready-to-end"), "trap '' TERM USR1"))
    with pytest.raises(SignalException) as ended:
        signalled(mine, signal.SIGTERM, Path("ready-to-end"), times=2)
    found = (ended.value.sigval, mine.ended_by, failures)
    assert found == (signal.SIGKILL, signal.SIGTERM, [])


def fails_to_save():
    mine, failures = agent(waits(Path("ready-to-fail"), "trap 'exit 1' USR1"))
    with pytest.raises(ChildFailedError):
        signalled(mine, signal.SIGTERM, Path("ready-to-fail"))
    assert failures == []


@contextmanager
def unused_port():
    """A port that refuses connections: it is bound, so no other process can listen to it."""
    with socket.socket() as held:
        held.bind(("localhost", 0))
        yield held.getsockname()[1]


def finds_no_store():
    with unused_port() as port:
        mine, _ = agent("true", f"localhost:{port}", 2, 1.5, "is_host=0")
        with pytest.raises(RendezvousConnectionError, match=r"be reached: .*Connection refused"):
            mine.work()


def finds_that_all_is_done():
    with unused_port() as port:
        mine, _ = agent("true", f"localhost:{port}", 2, 600, "is_host=0", is_finished=True)
        with pytest.raises(RendezvousClosedError, match="the others finished without this node"):
            mine.work()


def is_stopped_while_it_waits():
    with unused_port() as port:
        mine, _ = agent("true", f"localhost:{port}", 2, 600, "is_host=0")
        # Connecting is what it does with its handlers in place.
        mine.rendezvous.backend.store._connect = lambda: os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SignalException):
            mine.work()


def finds_nobody():
    rendezvous.ATTEMPT = 1
    mine, _ = agent("true", nodes=2, rejoin_seconds=1)
    with pytest.raises(RendezvousTimeoutError):
        mine.work()
    assert not mine.rendezvous.is_closed()


def meets_late(is_host):
    """The node that holds the rendezvous comes last."""
    time.sleep(2.0 * is_host)
    endpoint = f"127.0.0.2:{os.environ['LATE_PORT']}"
    # Where a core is shared by all these trials, a first attempt to meet may be too short.
    mine, _ = agent("[ $WORLD_SIZE = 2 ]", endpoint, 2, 600, f"is_host={is_host:d}")
    mine.work()


TRIALS = {
    "a failure is mended by a restart": partial(fails, "exit 1", "exited with status 1"),
    "a killed rank is started again": partial(fails, "kill -9 $BASHPID", "was killed by SIGKILL"),
    "what would fail again is not started again": partial(
        fails, f"exit {HOPELESS}", "exited with status 3", restarts=0
    ),
    "a second start may end well": heals,
    "SIGTERM is passed on as SIGUSR1": partial(saves, signal.SIGTERM, "USR1"),
    "SIGINT is passed on as SIGUSR1": partial(saves, signal.SIGINT, "USR1"),
    "SIGUSR1 is passed on as SIGTERM": partial(saves, signal.SIGUSR1, "TERM"),
    "a second signal ends all at once": ends_at_once,
    "a rank that fails while it is stopped is not started again": fails_to_save,
    "a node without a rendezvous gives up at its limit": finds_no_store,
    "a node does not wait for others that have finished": finds_that_all_is_done,
    "a signal ends the wait for the rendezvous": is_stopped_while_it_waits,
    "a node that gives up does not end the others": finds_nobody,
    "nodes meet where one comes early": partial(meets_late, False),
    "nodes meet where the one with the rendezvous comes last": partial(meets_late, True),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trials")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LATE_PORT", str(free_port()))
        # For a log that nobody reads, it looks at all modules, which here are thousands.
        patch.setattr(dynamic_rendezvous, "get_method_name", str)
        started = {name: forked.start(trial, folder) for name, trial in TRIALS.items()}
        return {name: each.wait() for name, each in started.items()}


@pytest.mark.parametrize("name", TRIALS)
def test_an_agent_does_what_is_right(name, ended):
    assert ended[name].status == 0, ended[name].stdout + ended[name].stderr


def trains_without_store(port):
    """Rank 0 only holds the store, and is frozen while the rank of the other's agent runs."""
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        held = rendezvous.Store("127.0.0.2", port)
        held.check(["any"])
        dist.barrier()
    else:
        dist.barrier()
        rendezvous.CALL_TIMEOUT = 0.5
        script = f"kill -STOP {pids[0]}; sleep 3; kill -CONT {pids[0]}"
        mine, failures = agent(script, f"127.0.0.2:{port}", conf="is_host=0")
        mine.work()
        assert failures == []
    dist.barrier()


@pytest.mark.gate
def test_ranks_go_on_while_the_rendezvous_is_out_of_reach():
    run_ranks(trains_without_store, 2, free_port())
