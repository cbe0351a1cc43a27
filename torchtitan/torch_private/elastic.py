"""Torch's elastic agent, and state as torch streams it from one process to another."""

import warnings
from typing import IO, Any


def forget_store(rendezvous: Any) -> None:
    """Let the ranks meet in a new store when they start again.

    The agents keep theirs, in which lie the addresses of ranks that are gone, and which may be that
    of a node that is gone (https://github.com/pytorch/pytorch/issues/135712).
    """
    assert hasattr(rendezvous, "_bootstrap_store_info"), "another rendezvous than torch's own"
    rendezvous._bootstrap_store_info = None


def leave(rendezvous: Any) -> None:
    """Be missed by the other nodes before long; torch's `shutdown` would end them too."""
    rendezvous._stop_heartbeats()


def read_stream(stream: IO[bytes]) -> Any:
    """What torch's `_streaming_save` wrote; only tensors and plain values are read, no code is run.

    Raises:
        pickle.UnpicklingError: where there is anything else.
    """
    from torch.distributed._serialization import _streaming_load

    with warnings.catch_warnings():
        # It fills the tensors by itself; nobody writes into the bytes they came as.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return _streaming_load(stream, weights_only=True)  # type: ignore[arg-type]
