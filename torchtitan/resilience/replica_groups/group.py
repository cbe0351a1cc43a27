"""One replica group among others, by torchft (https://pytorch.org/torchft).

Before each step the groups that are alive meet at a *lighthouse*. Those that are behind fetch the
whole state from one of the others. Then rank r of each group communicates with the ranks r of the
others. In a step they exchange

    recipes       digests, since groups of unlike recipes would drift apart unnoticed
    targets       the number over all groups; each divides its loss by it
    lanes         each group's position in the data, so that all know it when one is gone
    gradients     summed, as their losses are parts of one
    norm          the maximum, so that all clip by the same bits

When a group is lost during a step, the others drop the step and repeat it without it: no weight has
changed, and the data returns to its former position. If only some groups complete a step, the
others are one step behind, and catch up as above.

Torchft serves the state of a group, the output of `torch.save` including pickles, over plain HTTP
to any client, and reads it with an unpickler that runs what the stream names. The reader here takes
tensors and plain values only; anything else is an error.
"""

import json
import logging
import os
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config import ConfigError
from torchtitan.data import BatchStream
from torchtitan.logging import logger
from torchtitan.optim.parameters import local
from torchtitan.parallel import World
from torchtitan.resilience.replica_groups.settings import LIGHTHOUSE, FaultToleranceConfig
from torchtitan.torch_private.distributed import read_stream

if TYPE_CHECKING:
    from torchft import Manager
    from torchft.checkpointing import HTTPTransport

    from torchtitan.checkpoint import Checkpointable


class InMemoryState:
    """This rank's part of everything that training changes; no method communicates."""

    def __init__(self, contents: "Checkpointable", wait_until_writable: Callable[[], None]) -> None:
        """Wrap `contents`; `wait_until_writable` returns when weights may change."""
        self.contents, self.state, self.data = contents, contents.state, contents.data
        self.wait_until_writable = wait_until_writable

    def get(self) -> dict[str, Any]:
        """Return the state as tensors, live ones if possible, and plain values."""
        return {
            "tensors": self._tensors(with_optimizer=self.state.step > 0),
            "train_state": self.history(),
            "data": self.data.state_dict(),
        }

    def history(self) -> dict[str, Any]:
        """Return numbers that groups have in common if they have done the same steps."""
        return asdict(self.state)

    @torch.no_grad()
    def put(self, given: dict[str, Any]) -> None:
        """Load the result of `get` on the same rank of another run.

        Raises:
            ConfigError: if that run has another model, layout, optimizer or other data.
        """
        self.wait_until_writable()
        step = given["train_state"]["step"]
        # Before the first step there is no optimizer state; asking for it would create it.
        own, found = self._tensors(with_optimizer=step > 0), given["tensors"]
        for name in sorted({*own, *found}):
            there, here = (list(t[name].shape) if name in t else "absent" for t in (found, own))
            if there != here:
                raise ConfigError(f"another replica group's {name} is {there}, this one's {here}")
        for name, tensor in own.items():
            tensor.copy_(found[name])
        self.contents.take_optimizer(own)
        self.data.load_peer_state(given["data"])
        was = self.state.step
        for name, value in given["train_state"].items():
            setattr(self.state, name, value)
        if step != was:
            logger.info("loaded the state of another replica group: step %d, was %d", step, was)

    def _tensors(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        states = self.contents.of_optimizer() if with_optimizer else {}
        tensors = self.contents.weights() | states
        return {name: local(tensor).detach() for name, tensor in tensors.items()}


def transport(timeout: timedelta) -> "HTTPTransport[dict[str, Any]]":
    """Make the transport of a manager; no transfer may take longer than `timeout`."""
    from torchft.checkpointing import HTTPTransport

    class Transport(HTTPTransport):  # type: ignore[misc]
        def recv_checkpoint(
            self, src_rank: int, metadata: str, step: int, timeout: timedelta
        ) -> dict[str, Any]:
            with urlopen(f"{metadata}{step}/full", timeout=timeout.total_seconds()) as stream:
                state: dict[str, Any] = read_stream(stream)
                return state

    return Transport(timeout=timeout, num_chunks=0)


SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
MOST_FAILURES = 3
"""Steps in a row that a group may spoil before it has made one; then it gives up."""
TRACE = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable with the path of NCCL's traces; torchft would set it to one that no tool reads."""


class ReplicaGroup:
    """This rank's part among the groups; every rank calls every method of a step, in this order."""

    def __init__(
        self,
        config: FaultToleranceConfig,
        world: World,
        data: BatchStream,
        state: InMemoryState,
        recipe: Mapping[str, Any],
    ) -> None:
        """
        Args:
            state: what this rank gives to the same rank of another group, or takes over from it.
            recipe: by name, what groups must have in common to be one run.
        """
        self.config, self.world, self.data = config, world, data
        self.state = state
        self.digests = {name: _digest(value) for name, value in recipe.items()}
        # While a rank waits for its peer, the rest of its group may wait for that rank: so it has
        # to give up first.
        self.timeout = timedelta(seconds=world.comm.train_timeout_seconds / 2)
        self.groups = 0
        self.dropped = 0
        self.failures = 0
        self.has_made_a_step = False

    @contextmanager
    def join(self) -> Iterator[None]:
        """Be one of the groups as long as this is entered."""
        self.manager = self._manager()
        try:
            yield
        finally:
            self.manager.shutdown(wait=False)

    def _manager(self) -> "Manager":
        os.environ.setdefault("RUST_LOG", "warn")  # else every meeting takes ten lines
        logging.getLogger("torchft").setLevel(logging.CRITICAL)  # `should_commit` says what failed
        from torchft import Manager, ProcessGroupGloo

        world = self.world
        self.store, host, port = self._store()
        slow = timedelta(seconds=world.comm.init_timeout_seconds)
        trace = os.environ.pop(TRACE, None)
        try:
            return Manager(
                pg=ProcessGroupGloo(timeout=self.timeout),
                load_state_dict=self.state.put,
                state_dict=self.state.get,
                min_replica_size=self.config.min_replica_size,
                use_async_quorum=False,
                timeout=self.timeout,
                quorum_timeout=slow,
                connect_timeout=slow,
                rank=world.rank,
                world_size=world.size,
                store_addr=host,
                store_port=port,
                replica_id=f"group_{self.config.group}",
                checkpoint_transport=transport(self.timeout),
            )
        finally:
            if trace is not None:
                os.environ[TRACE] = trace

    def _store(self) -> tuple[Any, str, int]:
        """The store in which the ranks of this group find their manager, and groups each other."""
        from torch.distributed import TCPStore

        store, host, port = None, socket.gethostname(), 0
        if self.world.rank == 0:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = store.port
        host, port = self.world.broadcast_object((host, port))
        return store, host, port

    def start_quorum(self, step: int) -> int | None:
        """Agree on the groups of a step; a group that is behind catches up with the others.

        Returns:
            The number of groups, if it changed since the step before.
        """
        self.manager.load_state_dict({"step": step, "batches_committed": 0})
        try:
            self.manager.start_quorum()
        except (TimeoutError, RuntimeError) as error:
            raise RuntimeError(
                f"the replica groups did not meet within {self.world.comm.init_timeout_seconds} s "
                f"(comm.init_timeout_seconds) at {os.environ.get(LIGHTHOUSE)}: {error}"
            ) from error
        self.before = self.data.state_dict()
        was, self.groups = self.groups, self.manager.num_participants()
        if was == self.groups:
            return None
        log = logger.info if self.groups == self.config.groups else logger.warning
        numbers = self.manager.current_step(), self.groups, self.config.groups
        log("after step %d: %d of %d replica groups", *numbers)
        return self.groups

    def count(self, tokens: Tensor) -> Tensor:
        """The targets of all groups, from those of this one."""
        self._check_recipes()
        present = torch.zeros(self.config.groups, dtype=torch.int64)
        present[self.config.group] = 1
        own = self.data.positions()
        numbers = torch.cat([tokens.view(1).cpu(), present, own.view(-1)])
        self._reduce([numbers], SUM)
        if self.manager.errored():
            return tokens
        self.lanes = numbers[-own.numel() :].view_as(own)
        if numbers[1 : 1 + len(present)].max() > 1:
            message = f"{self.config.group}: another replica group has the same number"
            self._refuse(ConfigError(f"fault_tolerance.replica_id: got {message}"))
        return numbers[0].to(tokens.device)

    def _check_recipes(self) -> None:
        """Check that every digest is the same in all groups."""
        digests = self.digests | {"history": _digest(self.state.history())}
        own = torch.tensor(list(digests.values()))
        found = torch.cat([own, -own])
        self._reduce([found], MAX)
        highest, lowest = found[: len(own)], -found[len(own) :]
        unlike = ((highest != own) | (lowest != own)).tolist()
        names = [name for name, is_unlike in zip(digests, unlike, strict=True) if is_unlike]
        if self.manager.errored() or not names:
            return
        if names == ["history"]:
            message = (
                "replica groups are at the same step but were trained separately; start one "
                "group first, so that the others fetch its state"
            )
            self._refuse(RuntimeError(message))
        else:
            message = f"recipes of the replica groups differ in {', '.join(names)}; make them equal"
            self._refuse(ConfigError(f"fault_tolerance.enable: {message}"))

    def _refuse(self, error: Exception) -> None:
        """Do not train with these groups: the one that has just come ends."""
        if not self.has_made_a_step:
            raise error
        self.manager.report_error(error)

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Add up tensors over the groups, in place."""
        self._reduce([tensor for tensor in tensors if tensor.numel()], SUM)

    def max(self, value: Tensor) -> Tensor:
        """The largest of the groups' values, in place: the same bits for all of them."""
        self._reduce([value], MAX)
        return value

    def _reduce(self, tensors: Iterable[Tensor], how: dist.ReduceOp.RedOpType) -> None:
        """Reduce in place; after an error nothing more is sent, and the numbers are meaningless."""
        for work in [self.manager.allreduce(tensor, reduce_op=how) for tensor in tensors]:
            work.wait()

    def should_commit(self) -> bool:
        """Whether what was communicated since `start_quorum` is sound; else the step is void."""
        if self.manager.should_commit():
            self.data.update_positions(self.lanes)
            self.has_made_a_step, self.dropped, self.failures = True, 0, 0
            return True
        self.data.load_peer_state(self.before)
        error, enough = self.manager.errored(), self.groups >= self.config.min_replica_size
        why: object = "another rank of this group failed"
        if error is not None:
            why = error.original_exception
        elif not enough:
            why = f"fault_tolerance.min_replica_size is {self.config.min_replica_size}"
        if enough or self.dropped == 0:  # while groups are waited for, once is enough
            message = "a step of %d replica groups is discarded and repeated: %s"
            logger.warning(message, self.groups, why)
        self.dropped += 1
        self.failures += enough
        step = torch.tensor(self.manager.current_step())
        highest, lowest = self.world.max(torch.stack([step, -step]))
        if highest != -lowest:
            raise RuntimeError(
                "not all ranks of this replica group could fetch the state of another group"
            )
        if self.failures == MOST_FAILURES and not self.has_made_a_step:
            raise RuntimeError(
                f"no step with the other replica groups was committed; last error: {why}"
            )
        return False


def _digest(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
