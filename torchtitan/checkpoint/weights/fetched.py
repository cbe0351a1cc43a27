"""Safetensors files in a store, read as `safetensors.safe_open` reads those on a disk.

The format: 8 bytes with the length of a header, which is JSON and says where in what follows each
tensor is (https://github.com/huggingface/safetensors#format).
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from torchtitan.checkpoint.ranges import FetchedFiles
from torchtitan.checkpoint.storage import CODES
from torchtitan.config import ConfigError

DTYPES = {code: dtype for dtype, code in CODES.items()}
MAX_HEADER = 100_000_000
"""Bytes; safetensors itself reads no longer one."""


class FetchedSafetensors:
    """A file; opening it reads its header alone."""

    def __init__(self, path: Path, files: FetchedFiles) -> None:
        """Raises ConfigError where it is none, or is cut."""
        self.files, self.name = files, path.name
        size = files.size(path.name)
        begin = 8 + int.from_bytes(files.read(path.name, 0, min(8, size)), "little")
        if not 10 <= begin <= min(size, MAX_HEADER):
            raise ConfigError(f"{path}: not a complete safetensors file: it ends in its header")
        text = bytes(files.read(path.name, 8, begin))
        try:
            header: dict[str, Any] = json.loads(text)
            header.pop("__metadata__", None)
            self.slices = {tensor: Slice(self, begin, entry) for tensor, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not a complete safetensors file: {error}") from None
        end = max((one.end for one in self.slices.values()), default=begin)
        if end != size:
            raise ConfigError(
                f"{path}: not a complete safetensors file: it has {size:,} bytes; by its header "
                f"{end:,}"
            )

    def keys(self) -> Iterable[str]:
        """The names of the tensors."""
        return self.slices.keys()

    def get_slice(self, name: str) -> "Slice":
        """A tensor, of which nothing is read yet."""
        return self.slices[name]


class Slice:
    """A tensor in such a file; `slice[1:3, 0:2]` reads a block of it."""

    def __init__(self, file: FetchedSafetensors, begin: int, entry: dict[str, Any]) -> None:
        """`begin` is the first byte behind the header."""
        self.file, self.dtype, self.shape = (
            file,
            str(entry["dtype"]),
            list(map(int, entry["shape"])),
        )
        self.begin, self.end = (begin + int(offset) for offset in entry["data_offsets"])

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, spans: Sequence[slice]) -> Tensor:
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        ends = [span.indices(size) for span, size in zip(spans, self.shape, strict=True)]
        offsets, sizes = [low for low, _, _ in ends], [high - low for low, high, _ in ends]
        place = self.file.name, self.begin
        return self.file.files.block(place, DTYPES[self.dtype], strides, offsets, sizes)
