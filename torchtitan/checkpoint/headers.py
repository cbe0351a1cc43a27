"""Headers of safetensors files: the tensors of a file, and their byte ranges.

A file starts with the length of its header in 8 bytes; the header is JSON, and the tensors follow
(https://github.com/huggingface/safetensors#format). Reading a block of a tensor therefore takes
only its own bytes, on a disk and in a store.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtitan.checkpoint.manifest import Damaged
from torchtitan.checkpoint.ranges import Files
from torchtitan.checkpoint.storage import CODES, Sizes
from torchtitan.remote import refuse_pointer

LONGEST = 100 * 10**6
"""Maximum bytes of a header, as in the safetensors library."""
DTYPES = {code: dtype for dtype, code in CODES.items()}


class Stored(NamedTuple):
    """Location and type of a tensor in a file."""

    code: str
    """Name of the dtype in safetensors."""
    shape: Sizes
    begin: int
    """Offset of the first byte in the file."""
    end: int

    @property
    def dtype(self) -> torch.dtype | None:
        """Torch's dtype; None if it is not supported."""
        return DTYPES.get(self.code)


class Header(NamedTuple):
    """Header of a file: tensors by name, and metadata."""

    tensors: dict[str, Stored]
    metadata: dict[str, str]


def read_header(path: Path, files: Files) -> Header:
    """Read the header of a file among `files`.

    Raises:
        Damaged: if it is malformed, or the file is truncated.
    """
    where, size = f"{path}: not a complete safetensors file", files.size(path.name)
    data = 8 + int.from_bytes(files.read(path.name, 0, min(8, size)), "little")
    if not 10 <= data <= min(size, LONGEST):
        refuse_pointer(path, files.read(path.name, 0, min(1024, size)))
        raise Damaged(f"{where}: cut: it has {size:,} bytes; it ends in its header")
    try:
        header: dict[str, Any] = json.loads(bytes(files.read(path.name, 8, data)))
        metadata = dict(header.pop("__metadata__", {}))
        tensors = {name: _stored(name, entry, data) for name, entry in header.items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"{where}: its header is invalid: {error}") from None
    ends = {stored.end: name for name, stored in tensors.items()}
    last = max(ends, default=data)
    if last > size:
        raise Damaged(f"{where}: cut: it has {size:,} bytes, and {ends[last]} ends at {last:,}")
    if last < size:
        raise Damaged(f"{where}: it has {size:,} bytes, and ends at {last:,} by its header")
    return Header(tensors, metadata)


def _stored(name: str, entry: dict[str, Any], data: int) -> Stored:
    shape, (begin, end) = sizes(entry["shape"]), sizes(entry["data_offsets"])
    stored = Stored(str(entry["dtype"]), shape, data + begin, data + end)
    if stored.dtype and end - begin != math.prod(shape) * stored.dtype.itemsize:
        raise ValueError(f"{name} has {end - begin:,} bytes")
    return stored


def sizes(value: Any) -> Sizes:
    """Return `value` as a tuple of sizes or offsets; raise ValueError if it is anything else."""
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"found {value!r:.80} in place of sizes")
    return tuple(value)
