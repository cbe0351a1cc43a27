"""Tensors in files: every rank writes its pieces of them into one, and reads back what it needs.

    rank-3.safetensors   the pieces that rank 3 wrote, in the safetensors format
    tensors.json         for every tensor dtype, shape, digest, and where its pieces are

Who writes what is decided by the planner of torch's distributed checkpoint (DCP): a piece that many
ranks have is written by one, so that all have about the same work. DCP's own files are pickles,
which may run anything when they are read; these are numbers and JSON.

A file is written and hashed at the same time. The digest of a tensor is the exclusive or of the
bits of its elements (`torch.hash_tensor`), whatever pieces it is cut into: layouts that hold the
same weights have the same digest.
"""

import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from torchtitan.checkpoint.manifest import (
    STATE_FILE,
    Damaged,
    File,
    Manifest,
    read_manifest,
    read_whole,
    write_json,
    write_manifest,
)
from torchtitan.checkpoint.state import TrainState

INDEX = "tensors.json"
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
"""Dtypes as safetensors calls them."""
Sizes = tuple[int, ...]


class Piece(NamedTuple):
    """A block of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: Sizes
    """Of the whole tensor."""
    offsets: Sizes
    sizes: Sizes
    begin: int = 0
    """Its first byte in the file."""
    digest: int | None = None
    """None until it was read."""

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape

    @property
    def label(self) -> str:
        """Its name in the file."""
        if self.is_whole:
            return self.name
        spans = (f"{at}:{at + size}" for at, size in zip(self.offsets, self.sizes, strict=True))
        return f"{self.name}[{','.join(spans)}]"


@dataclass(frozen=True)
class Written:
    """A file of tensors, and what is in it."""

    name: str
    file: File
    pieces: tuple[Piece, ...]


class TensorSource(Protocol):
    """Named tensors that can be read one at a time, whole or in part."""

    def shapes(self) -> Mapping[str, tuple[torch.dtype, Sizes]]:
        """Dtype and shape by name."""
        ...

    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """A tensor, or a block of it; to be copied, not to be changed."""
        ...


def digest(tensor: Tensor) -> Tensor:
    """64 bits that follow from the elements, in any order; 0-d, on the tensor's device."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.uint64, device=tensor.device)
    return torch.hash_tensor(tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor)


def digest_of_all(digests: Mapping[str, int]) -> str:
    """One digest from those of all tensors."""
    lines = "".join(f"{name} {digests[name]:016x}\n" for name in sorted(digests))
    return xxhash.xxh3_64_hexdigest(lines.encode())


# --- writing ---


def write_file(path: Path, pieces: Sequence[tuple[Piece, Tensor]]) -> Written:
    """Write pieces into one file, down to the disk.

    The order is by size of element, so that each begins at a multiple of it. Where a piece has a
    digest already, made when it was staged, that of its bytes now must be the same.
    """
    pieces = sorted(pieces, key=lambda pair: -pair[0].dtype.itemsize)
    header, placed = _arrange([piece for piece, _ in pieces])
    state = xxhash.xxh3_128(header)
    digests: list[int] = []
    # Hashing is faster than writing: a second thread does it meanwhile.
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        _write_all(file.fileno(), memoryview(header))
        hashing = []
        for _, tensor in pieces:
            host = tensor.detach().cpu().contiguous()
            data = memoryview(host.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            hashing.append(hasher.submit(_hash, state, host, data))
            _write_all(file.fileno(), data)
        os.fsync(file.fileno())
        digests = [future.result() for future in hashing]
        size = os.fstat(file.fileno()).st_size
    for piece, now in zip(placed, digests, strict=True):
        if piece.digest not in (None, now):
            raise Damaged(f"{path}: {piece.label} changed between the step's end and the disk")
    done = tuple(p._replace(digest=now) for p, now in zip(placed, digests, strict=True))
    return Written(path.name, File(size, state.hexdigest()), done)


def _hash(state: Any, host: Tensor, data: memoryview) -> int:
    state.update(data)
    return int(digest(host).item())


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _arrange(pieces: Sequence[Piece]) -> tuple[bytes, list[Piece]]:
    """The header of a safetensors file, and where in the file each piece begins."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, begins = 0, []
    for piece in pieces:
        end = at + torch.Size(piece.sizes).numel() * piece.dtype.itemsize
        begins.append(at)
        entries[piece.label] = {
            "dtype": CODES[piece.dtype],
            "shape": list(piece.sizes),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [
        piece._replace(begin=len(header) + at) for piece, at in zip(pieces, begins, strict=True)
    ]


def index_of(written: Iterable[Written]) -> dict[str, Any]:
    """The content of tensors.json."""
    index: dict[str, Any] = {}
    for one in written:
        for piece in one.pieces:
            entry = index.setdefault(
                piece.name,
                {
                    "dtype": str(piece.dtype).removeprefix("torch."),
                    "shape": piece.shape,
                    "digest": 0,
                    "pieces": [],
                },
            )
            entry["digest"] ^= piece.digest or 0
            entry["pieces"].append([one.name, piece.begin, piece.offsets, piece.sizes])
    return {
        name: entry | {"digest": f"{entry['digest']:016x}"} for name, entry in sorted(index.items())
    }


def digest_of_index(index: Mapping[str, Any]) -> str:
    """One digest of all tensors."""
    return digest_of_all({name: int(entry["digest"], 16) for name, entry in index.items()})


def write_weights(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    about: Mapping[str, Any],
    max_shard_bytes: int,
) -> None:
    """Write a checkpoint of weights alone into an empty folder, one file at a time.

    Args:
        about: what train_state.json says of them, above all the recipe.
        max_shard_bytes: of the tensors in a file, unless a single one is larger.
    """
    written: list[Written] = []
    shard: list[tuple[Piece, Tensor]] = []

    def flush() -> None:
        written.append(write_file(folder / f"weights-{len(written)}.safetensors", shard))
        shard.clear()

    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            flush()
            size = 0
        shape = tuple(tensor.shape)
        shard.append((Piece(name, tensor.dtype, shape, (0,) * len(shape), shape), tensor))
        size += tensor.nbytes
    if shard:
        flush()
    state = {"train_state": asdict(TrainState()), **about}
    write_manifest_of(folder, written, state, step=0, model_only=True, ranks=1, layout={})


def write_manifest_of(
    folder: Path, written: Sequence[Written], state: Mapping[str, Any], **what: Any
) -> Manifest:
    """Write the rest of a checkpoint whose tensors are on disk: index, state, manifest.

    Args:
        what: the fields of the manifest that do not follow from these.
    """
    index = index_of(written)
    files = {one.name: one.file for one in written}
    files[INDEX] = write_json(folder / INDEX, index)
    files[STATE_FILE] = write_json(folder / STATE_FILE, state)
    manifest = Manifest(digest=digest_of_index(index), files=files, **what)
    write_manifest(folder, manifest)
    return manifest


# --- reading ---


class SavedTensors:
    """The tensors of a checkpoint of ours."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises Damaged where the manifest or the index is not what was saved."""
        self.checkpoint = checkpoint
        index = read_whole(checkpoint, read_manifest(checkpoint), INDEX)
        self.index: dict[str, Any] = json.loads(index)
        self._maps: dict[str, mmap.mmap] = {}

    def shapes(self) -> dict[str, tuple[torch.dtype, Sizes]]:
        """Dtype and shape by name."""
        return {
            name: (getattr(torch, entry["dtype"]), tuple(entry["shape"]))
            for name, entry in self.index.items()
        }

    def digests(self) -> dict[str, int]:
        """By name, as they were when the tensors were saved."""
        return {name: int(entry["digest"], 16) for name, entry in self.index.items()}

    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """A tensor, or a block of it: a view of the file where one piece holds all of it."""
        entry = self.index[name]
        sizes = entry["shape"] if sizes is None else sizes
        offsets = [0] * len(sizes) if offsets is None else offsets
        found: Tensor | None = None
        for file, begin, at, shape in entry["pieces"]:
            spans = [
                (max(a, b), min(a + n, b + m))
                for a, n, b, m in zip(offsets, sizes, at, shape, strict=True)
            ]
            if any(low >= high for low, high in spans):
                continue
            piece = self._piece(file, begin, shape, entry["dtype"])
            part = piece[
                tuple(slice(low - b, high - b) for (low, high), b in zip(spans, at, strict=True))
            ]
            if list(part.shape) == list(sizes):
                return part
            if found is None:
                found = torch.empty(tuple(sizes), dtype=piece.dtype)
            found[
                tuple(
                    slice(low - a, high - a) for (low, high), a in zip(spans, offsets, strict=True)
                )
            ] = part
        return (
            torch.empty(tuple(sizes), dtype=getattr(torch, entry["dtype"]))
            if found is None
            else found
        )

    def _piece(self, file: str, begin: int, shape: Sequence[int], dtype: str) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        if file not in self._maps:
            try:
                with (self.checkpoint / file).open("rb") as opened:
                    # A private copy of what is written to it, which is nothing; torch warns of
                    # memory that cannot be written to.
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise Damaged(f"{self.checkpoint / file}: {error.strerror}") from None
        count = torch.Size(shape).numel()
        return torch.frombuffer(self._maps[file], dtype=kind, count=count, offset=begin).view(shape)
