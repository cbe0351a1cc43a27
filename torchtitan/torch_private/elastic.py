"""Torch's elastic agent, and its format for streaming state between processes."""

import warnings
from typing import IO, Any


def forget_store(rendezvous: Any) -> None:
    """Make the ranks use a new store when they restart.

    The agents reuse theirs, which has the addresses of dead ranks, and may be on a dead node
    (https://github.com/pytorch/pytorch/issues/135712).
    """
    assert hasattr(rendezvous, "_bootstrap_store_info"), "another rendezvous than torch's own"
    rendezvous._bootstrap_store_info = None


def leave(rendezvous: Any) -> None:
    """Leave, so that the other nodes soon notice; torch's `shutdown` would end them too."""
    rendezvous._stop_heartbeats()


def read_stream(stream: IO[bytes]) -> Any:
    """Read the output of torch's `_streaming_save`: tensors and plain values, without running code.

    Raises:
        pickle.UnpicklingError: if there is anything else.
    """
    from torch.distributed._serialization import _streaming_load

    with warnings.catch_warnings():
        # It fills the tensors itself; their original bytes are never written to.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return _streaming_load(stream, weights_only=True)  # type: ignore[arg-type]
