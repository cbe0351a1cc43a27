"""Starts, watches and restarts the ranks of this node: torch's elastic agent, adapted.

The agents of all nodes rendezvous, number the ranks, and start them. When a rank fails, each agent
ends those of its node, and all rendezvous again: with the remaining nodes, or with new ones. The
agent of torch does that after every failure, and exits on a signal. This one

- does not restart what would fail again (a wrong recipe, a run that diverged);
- forwards signals to the ranks, and lets them save;
- lets them save too before they restart with other nodes, and continues when another node was
  stopped but this one was not, if the run allows fewer nodes;
- tries again for some time where the others cannot be reached, and never ends them because of that.

It overrides extension points that torch documents:
https://docs.pytorch.org/docs/stable/elastic/agent.html
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousParameters,
)
from torch.distributed.run import config_from_args, get_args_parser

from torchtitan.cluster.rendezvous import open_rendezvous
from torchtitan.logging import logger
from torchtitan.resilience.stop import IS_LAST, REPEATED, handled
from torchtitan.torch_private.distributed import forget_store, leave

# A request is forwarded as a different signal, because a scheduler may have sent the ranks the same
# one, and the same signal twice means: immediately.
FORWARDED_AS = {
    signal.SIGINT: signal.SIGUSR1,
    signal.SIGTERM: signal.SIGUSR1,
    signal.SIGUSR1: signal.SIGTERM,
    signal.SIGHUP: signal.SIGUSR1,
}
# Seconds in which healthy ranks should have saved, before they are replaced.
SAVE_TIMEOUT = 600.0
# Seconds between two attempts to meet the other nodes.
RETRY_INTERVAL = 1.0
# Seconds between two messages that it did not succeed yet.
LOG_INTERVAL = 55.0
# Seconds to wait for the agents of other nodes at the end; some may still be training.
EXIT_BARRIER_TIMEOUT = {"fixed": 300.0, "elastic": 30.0}


class Agent(LocalElasticAgent):
    """The elastic agent of this node."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        rejoin_seconds: float,
        not_restarted: Sequence[int],
        is_finished: Callable[[], bool],
        at_failure: Callable[[], None],
        yields_to: str | None = None,
        saves: bool = True,
    ) -> None:
        """`words` are the arguments of a torchrun command.

        Args:
            rejoin_seconds: time in which nodes try to meet.
            not_restarted: exit statuses of a rank that a restart cannot fix.
            is_finished: whether the run reached its last step.
            at_failure: called before a restart, which removes the traces of the failure.
            yields_to: name of a run at the same endpoint; `work` raises RendezvousClosedError if
                it begins before all nodes have met.
            saves: whether ranks that are asked to stop save what they have.
        """
        parsed = get_args_parser().parse_args(list(words))
        config, command, arguments = config_from_args(parsed)
        assert config.logs_specs is not None
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
        self.is_elastic = config.min_nodes < config.max_nodes
        self.has_others = config.max_nodes > 1
        """Whether there may be other nodes, which may stop the run."""
        self.rendezvous = open_rendezvous(
            RendezvousParameters(
                config.rdzv_backend,
                config.rdzv_endpoint,
                config.run_id,
                config.min_nodes,
                config.max_nodes,
                config.local_addr,
                **config.rdzv_configs,
            ),
            yields_to,
        )
        self.spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=command,
            args=tuple(arguments),
            rdzv_handler=self.rendezvous,
            max_restarts=config.max_restarts,
            monitor_interval=config.monitor_interval,
            numa_options=config.numa_options,
        )
        super().__init__(
            self.spec,
            config.logs_specs,
            exit_barrier_timeout=EXIT_BARRIER_TIMEOUT["elastic" if self.is_elastic else "fixed"],
        )
        self.rejoin_seconds = rejoin_seconds
        self.not_restarted, self.is_finished = not_restarted, is_finished
        self.at_failure, self.saves = at_failure, saves
        self.began = time.time()
        """Time of the last start of the ranks."""
        self.stopped_by: signal.Signals | None = None
        """The first signal to this process."""
        self.ended_by: signal.Signals | None = None
        """The second one, which ends the ranks at once."""
        self._has_forwarded = False
        self._in_rendezvous = True
        self._restarts = 0
        self._failure = ""
        """Description of a failure that is not yet reported."""

    def work(self) -> None:
        """Run the ranks until they are done.

        Raises:
            ChildFailedError: if ranks of this node failed, and are not to be restarted.
            SignalException: on a signal while there are no ranks to forward it to, or a second one.
            RendezvousError: if the nodes could not meet in time, or another one ended the run.
        """
        before = {n: signal.signal(n, self._on_signal) for n in handled(FORWARDED_AS)}
        leaves = False
        try:
            self.run()
            if IS_LAST.get():
                before = dict.fromkeys(before, signal.SIG_IGN)
        except (RendezvousError, dist.DistError):
            leaves = True  # the others may still meet
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if leaves or (self.stopped_by and self.is_elastic):
                leave(self.rendezvous)
            else:
                self.rendezvous.shutdown()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stopped_by and number in REPEATED:
            return
        received = signal.Signals(number)
        self.ended_by = received if self.stopped_by else None
        self.stopped_by = self.stopped_by or received
        if self.ended_by or self._in_rendezvous:
            raise SignalException(received.name, signal.SIGKILL)
        what = "and save" if self.saves else "but save nothing: see [checkpoint]"
        again = "" if number in REPEATED else "; send the signal again to end them immediately"
        logger.info("%s: the ranks finish their step %s%s", self.stopped_by.name, what, again)

    def _request_save(self, by: signal.Signals) -> None:
        """Ask the ranks of this node to save and exit."""
        for worker in self.get_worker_group().workers:
            try:
                os.kill(worker.id, FORWARDED_AS[by])
            except ProcessLookupError:
                continue  # it has just ended

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._in_rendezvous = True
        if self.stopped_by:
            raise SignalException(self.stopped_by.name, signal.SIGKILL)
        self._meet(worker_group)
        self._in_rendezvous, self.began = False, time.time()

    def _meet(self, worker_group: WorkerGroup) -> None:
        """Try to meet the other nodes until they have finished, or the time for that is over."""
        began = logged = time.monotonic()
        while True:
            forget_store(self.rendezvous)
            try:
                super()._rendezvous(worker_group)
                self.rendezvous.backend.closed_by = None
                return
            except (RendezvousClosedError, RendezvousGracefulExitError):
                raise
            except (RendezvousError, dist.DistError) as error:
                if self.is_finished():
                    raise RendezvousClosedError("the others finished without this node") from error
                now = time.monotonic()
                left = began + self.rejoin_seconds - now
                if left <= 0:
                    raise
                if now - logged > LOG_INTERVAL:
                    logged, why = now, str(error).partition("\n")[0] or "too few nodes have joined"
                    logger.info("waiting for other nodes: %s; %.0f minutes left", why, left / 60)
            time.sleep(RETRY_INTERVAL)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.stopped_by and not self._has_forwarded:
            self._request_save(self.stopped_by)
            self._has_forwarded = True
        if os.getpid() == 1:
            reap(keep=[worker.id for worker in worker_group.workers])
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._restart_or_raise(result.failures)
        continues = self.is_elastic and not self.stopped_by
        if result.state == WorkerState.SUCCEEDED and continues and not self.is_finished():
            logger.warning("another node stopped the ranks before the last step; continuing")
            worker_group.state = result.state
            self._restart_workers(worker_group)
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _restart_or_raise(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Let the ranks be restarted, or raise ChildFailedError."""
        is_final = any(failure.exitcode in self.not_restarted for failure in failures.values())
        if is_final or self.stopped_by or self._restarts == self.spec.max_restarts:
            raise ChildFailedError("torchtitan.train", dict(failures))
        self._restarts += 1
        counts = f"restart {self._restarts} of {self.spec.max_restarts}"
        self._failure = f"{describe(failures)}; {counts}"

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            if not self._has_forwarded:
                logger.warning("another node joined: the ranks save and restart with it")
                self._request_save(signal.SIGTERM)
            until = time.monotonic() + SAVE_TIMEOUT
            while super()._monitor_workers(worker_group).state == WorkerState.HEALTHY:
                if time.monotonic() > until:
                    break
                time.sleep(self.spec.monitor_interval)
        super()._stop_workers(worker_group)
        if self._failure:  # after all that the ranks have written
            self.at_failure()
            logger.warning("%s", self._failure)
            self._failure = ""


def reap(keep: Collection[int]) -> None:
    """Wait for processes that ended and were left to this one, the first of its container."""
    peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (ended := os.waitid(os.P_ALL, 0, peek)) and ended.si_pid not in keep:
        os.waitpid(ended.si_pid, 0)


def describe(failures: Mapping[int, ProcessFailure]) -> str:
    """Describe the first rank that failed, and its failure."""
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {failure.signal_name()}"
    return f"rank {rank} exited with status {failure.exitcode}"
