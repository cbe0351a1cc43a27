"""Starts the ranks of this node, watches them, and starts them again: torch's elastic agent.

The agents of all nodes meet, number the ranks, and start them. When a rank fails, each agent ends
those of its node, and all meet anew: with the nodes that are left, or with new ones. Torch's agent
does that after every failure, and takes a signal to itself as the end. This one

- does not restart what would fail again (a wrong recipe, a run that diverged);
- passes signals on to the ranks, and lets them save;
- lets them save too before they start again with other nodes, and goes on where another node was
  told to stop but this one was not, if the run may do with fewer.

What is overridden are the extension points that torch documents:
https://docs.pytorch.org/docs/stable/elastic/agent.html
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.run import config_from_args, get_args_parser

from torchtitan.logging import logger
from torchtitan.torch_private.elastic import forget_store, leave

# A request is passed on as another signal than came, because a scheduler may have sent the ranks
# the same one, and twice the same means: at once.
PASSED_ON = {
    signal.SIGINT: signal.SIGUSR1,
    signal.SIGTERM: signal.SIGUSR1,
    signal.SIGUSR1: signal.SIGTERM,
}
# Seconds in which ranks that are well should have saved, before others take their place.
PATIENCE = 600.0
# Seconds to wait for the agents of other nodes at the end; some may rather go on.
BARRIER = {"fixed": 300.0, "elastic": 30.0}


class Agent(LocalElasticAgent):
    """The elastic agent of this node."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        hopeless: Sequence[int],
        is_finished: Callable[[], bool],
        at_failure: Callable[[], None],
    ) -> None:
        """`words` are those of a torchrun command.

        Args:
            hopeless: exit statuses of a rank that a restart cannot mend.
            is_finished: whether the run came to its last step.
            at_failure: called before a restart, which removes the traces of the failure.
        """
        parsed = get_args_parser().parse_args(list(words))
        config, command, arguments = config_from_args(parsed)
        assert config.logs_specs is not None
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
        self.is_elastic = config.min_nodes < config.max_nodes
        self.rendezvous = registry.get_rendezvous_handler(
            RendezvousParameters(
                config.rdzv_backend,
                config.rdzv_endpoint,
                config.run_id,
                config.min_nodes,
                config.max_nodes,
                **config.rdzv_configs,
            )
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
            exit_barrier_timeout=BARRIER["elastic" if self.is_elastic else "fixed"],
        )
        self.hopeless, self.is_finished, self.at_failure = hopeless, is_finished, at_failure
        self.began = time.time()
        """When the ranks were last started."""
        self.stopped_by: signal.Signals | None = None
        """The first signal to this process."""
        self.at_once = False
        """Whether there was a second one."""
        self._told = False
        self._meets = True
        self._restarts = 0

    def work(self) -> None:
        """Run the ranks until they are done.

        Raises:
            ChildFailedError: where ranks of this node failed, and are not to be restarted.
            SignalException: where a signal came that there was nobody to pass on to, or a second.
            RendezvousError: where the nodes did not meet.
        """
        before = {number: signal.signal(number, self._take) for number in PASSED_ON}
        try:
            self.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.stopped_by and self.is_elastic:
                leave(self.rendezvous)
            else:
                self.rendezvous.shutdown()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.at_once = self.stopped_by is not None
        self.stopped_by = self.stopped_by or signal.Signals(number)
        if self.at_once or self._meets:
            raise SignalException(f"{signal.Signals(number).name}", signal.SIGKILL)
        told = "%s: the ranks finish their step and save; once more to end them at once"
        logger.info(told, self.stopped_by.name)

    def _ask(self, by: signal.Signals) -> None:
        """Ask the ranks of this node to save and go."""
        for worker in self.get_worker_group().workers:
            try:
                os.kill(worker.id, PASSED_ON[by])
            except ProcessLookupError:
                continue  # it has just ended

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._meets = True
        if self.stopped_by:
            raise SignalException(self.stopped_by.name, signal.SIGKILL)
        forget_store(self.rendezvous)
        super()._rendezvous(worker_group)
        self._meets, self.began = False, time.time()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.stopped_by and not self._told:
            self._ask(self.stopped_by)
            self._told = True
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._judge(result.failures)
        goes_on = self.is_elastic and not self.stopped_by
        if result.state == WorkerState.SUCCEEDED and goes_on and not self.is_finished():
            logger.warning("another node ended the ranks before the last step; going on")
            worker_group.state = result.state
            self._restart_workers(worker_group)
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _judge(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Let the ranks be restarted, or raise ChildFailedError."""
        is_hopeless = any(failure.exitcode in self.hopeless for failure in failures.values())
        if is_hopeless or self.stopped_by or self._restarts == self.spec.max_restarts:
            raise ChildFailedError("torchtitan.train", dict(failures))
        self._restarts += 1
        self.at_failure()
        told = "%s; restart %d of %d"
        logger.warning(told, describe(failures), self._restarts, self.spec.max_restarts)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            if not self._told:
                logger.warning("another node has come: the ranks save, and start again with it")
                self._ask(signal.SIGTERM)
            until = time.monotonic() + PATIENCE
            while super()._monitor_workers(worker_group).state == WorkerState.HEALTHY:
                if time.monotonic() > until:
                    break
                time.sleep(self.spec.monitor_interval)
        super()._stop_workers(worker_group)


def describe(failures: Mapping[int, ProcessFailure]) -> str:
    """Which rank failed first, and how."""
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {failure.signal_name()}"
    return f"rank {rank} ended with status {failure.exitcode}"
