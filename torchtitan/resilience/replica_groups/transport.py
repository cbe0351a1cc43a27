"""Transfers the state of a group to another: torchft's server, and a reader that runs no code.

Torchft serves the output of `torch.save`, including pickles, over plain HTTP to any client, and
reads it with an unpickler that runs what the stream names. This reader takes tensors and plain
values only; anything else is an error.
"""

from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from torchtitan.torch_private.elastic import read_stream

if TYPE_CHECKING:
    from torchft.checkpointing import HTTPTransport


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
