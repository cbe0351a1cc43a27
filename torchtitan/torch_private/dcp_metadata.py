"""Location of an item in torch's distributed checkpoint: a class that only its pickles name."""

from typing import Any


def storage_info(file: str, offset: int, length: int) -> Any:
    """Build the location of `length` bytes of a file from `offset` on, as in `.metadata`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)
