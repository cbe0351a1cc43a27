"""Transfers the state of a group to another: what it is, torchft's server, and a safe reader.

Torchft serves the output of `torch.save`, including pickles, over plain HTTP to any client, and
reads it with an unpickler that runs what the stream names. This reader takes tensors and plain
values only; anything else is an error.
"""

from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import torch
from torch import Tensor

from torchtitan.config import ConfigError
from torchtitan.logging import logger
from torchtitan.optim.optimizer_group import local
from torchtitan.torch_private.distributed import read_stream

if TYPE_CHECKING:
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
            "train_state": asdict(self.state),
            "data": self.data.state_dict(),
        }

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
