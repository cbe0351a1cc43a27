"""Files of tensors, of which only the requested bytes are read.

On a disk a file is mapped into memory, and what is read is a view of it. From a store ranges are
fetched: long ones by several requests at once, short ones out of blocks that are kept for a while,
since tensors that are loaded one after the other are adjacent in the file.

A safetensors file starts with the length of its header in 8 bytes; the header is JSON, and the
tensors follow (https://github.com/huggingface/safetensors#format). So reading a block of a tensor
takes only its own bytes.
"""

import itertools
import json
import math
import mmap
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchtitan.checkpoint.manifest import Damaged, reading
from torchtitan.remote import PART, RemotePath, refuse_pointer

AHEAD = 4
"""Number of blocks fetched together when files are read sequentially."""
KEPT = 8
"""Number of cached blocks."""
MAPPED = 256
"""Number of files mapped at once; each counts toward a process's open files, often 1,024."""
SPAN = 64 * 2**20
"""Bytes of rows that are copied or fetched together, to slice a part of each."""
SHARDING = "DCP_SHARDING_INFO"
"""Key in the metadata of a file whose tensors are blocks, as in DCP's safetensors."""
LONGEST = 100 * 10**6
"""Maximum bytes of a header, as in the safetensors library."""
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors."""
DTYPES = {code: dtype for dtype, code in CODES.items()}
Sizes = tuple[int, ...]
Kind = tuple[torch.dtype, Sizes]
"""Dtype and shape of a tensor."""
Place = TypeVar("Place")


class Piece(NamedTuple):
    """Block of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: Sizes
    """Shape of the whole tensor."""
    offsets: Sizes
    sizes: Sizes
    begin: int = 0
    """Offset of the first byte in the file."""
    digest: int | None = None
    """Digest of the block; None until it is computed."""

    @classmethod
    def whole(cls, name: str, dtype: torch.dtype, shape: Sequence[int]) -> "Piece":
        """Return a whole tensor as a block."""
        return cls(name, dtype, tuple(shape), (0,) * len(shape), tuple(shape))


class StoredBlock(NamedTuple, Generic[Place]):
    """Block of a tensor and its location."""

    offsets: Sizes
    sizes: Sizes
    place: Place


class TensorSource(ABC):
    """Named tensors that can be read one at a time, whole or in part."""

    kinds: Mapping[str, Kind]

    def shapes(self) -> Mapping[str, Kind]:
        """Return dtype and shape by name."""
        return self.kinds

    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Read a tensor, or a block of it; copy it, do not modify it."""
        shape = self.kinds[name][1]
        sizes = shape if sizes is None else tuple(sizes)
        return self.part(name, (0,) * len(shape) if offsets is None else tuple(offsets), sizes)

    @abstractmethod
    def part(self, name: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        """Read a block of a tensor; see `read`."""


def join_pieces(
    dtype: torch.dtype,
    offsets: Sizes,
    sizes: Sizes,
    blocks: Iterable[StoredBlock[Place]],
    read: Callable[[StoredBlock[Place], Sizes, Sizes], Tensor],
    where: str,
) -> Tensor:
    """Assemble a part of a tensor from its blocks, without copying if it is within one of them.

    `read` reads a part of a block, given offsets in it and sizes. Raises Damaged, with `where`, if
    some elements are in no block.
    """
    found, left = torch.empty(sizes, dtype=dtype), math.prod(sizes)
    for block in blocks:
        spans = [
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(offsets, sizes, block.offsets, block.sizes, strict=True)
        ]
        if any(low >= high for low, high in spans):
            continue
        inside = tuple(low - b for (low, _), b in zip(spans, block.offsets, strict=True))
        part = read(block, inside, tuple(high - low for low, high in spans))
        if part.shape == sizes:
            return part
        left -= part.numel()
        at = (slice(low - a, high - a) for (low, high), a in zip(spans, offsets, strict=True))
        found[tuple(at)] = part
    if left > 0:
        raise Damaged(f"{where}: damaged: {left:,} of {found.numel():,} elements are in no file")
    return found


class Files(ABC):
    """Files of a folder, by name."""

    is_mapped = False
    """Whether a range that is read is memory of the file itself, and not a copy."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    @abstractmethod
    def read(self, name: str, begin: int, end: int) -> memoryview:
        """Read a range of bytes of a file; copy them, do not modify them."""

    def block(
        self,
        place: tuple[str, int],
        dtype: torch.dtype,
        strides: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> Tensor:
        """Read a part of an array that starts at `place`, a file and an offset in it.

        `strides` are the array's, in elements. At most SPAN bytes of long rows are copied before
        slicing.
        """
        (name, begin), itemsize = place, dtype.itemsize
        is_view = self.is_mapped and begin % itemsize == 0
        begin += itemsize * sum(at * stride for at, stride in zip(offsets, strides, strict=True))
        if is_view or 0 in sizes or not sizes:
            return self._span(name, begin, dtype, strides, sizes)
        rows = max(1, SPAN // (strides[0] * itemsize)) if strides[0] else sizes[0]
        of_row = sum((n - 1) * stride for n, stride in zip(sizes[1:], strides[1:], strict=True))
        if rows >= sizes[0] or of_row + 1 >= strides[0]:
            return self._span(name, begin, dtype, strides, sizes)
        found = torch.empty(tuple(sizes), dtype=dtype)
        for row in range(0, sizes[0], rows):
            at, part = begin + row * strides[0] * itemsize, (min(rows, sizes[0] - row), *sizes[1:])
            found[row : row + rows] = self._span(name, at, dtype, strides, part)
        return found

    def _span(
        self,
        name: str,
        begin: int,
        dtype: torch.dtype,
        strides: Sequence[int],
        sizes: Sequence[int],
    ) -> Tensor:
        """Return a block as a view of the bytes from its first element, at `begin`, to its last.

        Compiled loops may crash on elements that are not aligned to their size; such bytes are
        copied first.
        """
        if 0 in sizes:
            return torch.empty(tuple(sizes), dtype=dtype)
        last = sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        data = self.read(name, begin, begin + (last + 1) * dtype.itemsize)
        flat = torch.frombuffer(data, dtype=torch.uint8)
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).as_strided(tuple(sizes), tuple(strides))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous array, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def files_in(folder: Path) -> Files:
    """Open the files of a folder on a disk or a store."""
    return FetchedFiles(folder) if isinstance(folder, RemotePath) else MappedFiles(folder)


class MappedFiles(Files):
    """Files on a disk."""

    is_mapped = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._maps: dict[str, memoryview] = {}

    def size(self, name: str) -> int:
        return len(self._map(name))

    def read(self, name: str, begin: int, end: int) -> memoryview:
        return self._map(name)[begin:end]

    def _map(self, name: str) -> memoryview:
        if name not in self._maps:
            path = self.folder / name
            with reading(path), path.open("rb") as opened:
                # Writable (copy-on-write), though nothing writes: torch warns of read-only memory.
                is_empty = opened.seek(0, 2) == 0  # which cannot be mapped
                whole = b"" if is_empty else mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            if len(self._maps) == MAPPED:
                del self._maps[next(iter(self._maps))]  # views keep it alive
            self._maps[name] = memoryview(whole)
        return self._maps[name]


class FetchedFiles(Files):
    """Files in a store."""

    def __init__(self, folder: RemotePath) -> None:
        self.folder = folder
        self._sizes: dict[str, int] = {}
        self._blocks: OrderedDict[tuple[str, int], memoryview] = OrderedDict()

    def size(self, name: str) -> int:
        self._sizes = self._sizes or self.folder.sizes()
        if name not in self._sizes:
            raise Damaged(f"{self.folder / name}: No such file or directory")
        return self._sizes[name]

    def read(self, name: str, begin: int, end: int) -> memoryview:
        if end - begin >= PART:
            return self._fetch(name, begin, end)
        first, last = begin // PART, max(begin, end - 1) // PART
        parts = [self._block(name, number) for number in range(first, last + 1)]
        whole = parts[0] if len(parts) == 1 else memoryview(bytearray().join(parts))
        return whole[begin - first * PART : end - first * PART]

    def _fetch(self, name: str, begin: int, end: int) -> memoryview:
        view = memoryview(bytearray(end - begin))
        self.folder.joinpath(name).read_into(view, begin)
        return view

    def _block(self, name: str, number: int) -> memoryview:
        if (name, number) not in self._blocks:
            count = AHEAD if (name, number - 1) in self._blocks else 1
            begin, end = number * PART, min((number + count) * PART, self.size(name))
            found = self._fetch(name, begin, max(begin, end))
            for ahead in range(count):
                self._blocks[name, number + ahead] = found[ahead * PART : (ahead + 1) * PART]
            while len(self._blocks) > KEPT:
                self._blocks.popitem(last=False)
        return self._blocks[name, number]


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
    """Header of a file."""

    tensors: dict[str, Stored]
    sharding: dict[str, Any]
    """Facts that DCP adds to blocks of tensors, by name; empty if all tensors are whole."""

    def offsets(self, name: str) -> Sizes:
        """Return the offsets of a block in its tensor; raise ValueError or alike if unknown."""
        if self.sharding:
            return sizes(self.sharding[name]["saved_offsets"])
        return (0,) * len(self.tensors[name].shape)


def read_header(path: Path, files: Files) -> Header:
    """Read a file's header; raise Damaged if it is malformed, or the file is not all there."""
    where, size = f"{path}: not a complete safetensors file", files.size(path.name)
    data = 8 + int.from_bytes(files.read(path.name, 0, min(8, size)), "little")
    if not 10 <= data <= min(size, LONGEST):
        refuse_pointer(path, files.read(path.name, 0, min(1024, size)))
        raise Damaged(f"{where}: cut: it has {size:,} bytes; it ends in its header")
    try:
        header: dict[str, Any] = json.loads(bytes(files.read(path.name, 8, data)))
        metadata = dict(header.pop("__metadata__", {}))
        tensors = {name: _stored(name, entry, data) for name, entry in header.items()}
        sharding = dict(json.loads(metadata.get(SHARDING, "{}")))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise Damaged(f"{where}: its header is invalid: {error}") from None
    by_place = sorted((stored.begin, stored.end, name) for name, stored in tensors.items())
    for (_, end, first), (begin, _, second) in itertools.pairwise(by_place):
        if begin < end:
            raise Damaged(f"{where}: its header is invalid: {first} and {second} overlap")
    ends = {stored.end: name for name, stored in tensors.items()}
    last = max(ends, default=data)
    if last > size:
        raise Damaged(f"{where}: cut: it has {size:,} bytes, and {ends[last]} ends at {last:,}")
    if last < size:
        raise Damaged(f"{where}: it has {size:,} bytes, and ends at {last:,} by its header")
    return Header(tensors, sharding)


def _stored(name: str, entry: dict[str, Any], data: int) -> Stored:
    shape, (begin, end) = sizes(entry["shape"]), sizes(entry["data_offsets"])
    stored = Stored(str(entry["dtype"]), shape, data + begin, data + end)
    if stored.dtype and end - begin != math.prod(shape) * stored.dtype.itemsize:
        raise ValueError(f"{name} has {end - begin:,} bytes")
    return stored


def sizes(value: Any, kind: type[Sequence[Any]] = list) -> Sizes:
    """Return the sizes or offsets in a `kind` of sequence; raise ValueError for anything else."""
    if not isinstance(value, kind) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"found {value!r:.80} in place of sizes")
    return tuple(value)
