"""Tensors in files: every rank writes its pieces into one file, and reads the blocks it needs.

    rank-3.safetensors   the pieces that rank 3 wrote, in the safetensors format
    tensors.json         dtype, shape, digest and locations of the pieces of every tensor

The planner of torch's distributed checkpoint (DCP) decides who writes what: a piece that many ranks
have is written by one, balancing the load. DCP's own files are pickles, which may run anything when
they are read; these are numbers and JSON. A file with parts of tensors has in its header, as DCP's
safetensors do, the offset of each piece in the whole tensor: torch alone can load them, by
`torch.distributed.checkpoint.HuggingFaceStorageReader`.

A file is written and hashed at the same time. The digest of a tensor is the sum of its pieces'
digests, however it is cut (`torchtitan.digest`), so it does not depend on the layout. In format 2
it was the exclusive or of the bits of all elements, which does not depend on their order; such
checkpoints are verified by it.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import xxhash
from torch import Tensor

from torchtitan.checkpoint.folder import TrainState
from torchtitan.checkpoint.manifest import (
    STATE_FILE,
    XOR_FORMAT,
    Damaged,
    File,
    Manifest,
    read_manifest,
    read_whole,
    write_json,
    write_manifest,
)
from torchtitan.checkpoint.ranges import CODES, Sizes, contiguous, files_in
from torchtitan.checkpoint.store import store_of
from torchtitan.digest import digest, unsigned

INDEX = "tensors.json"


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


@dataclass(frozen=True)
class Written:
    """File of tensors and its contents."""

    name: str
    file: File
    pieces: tuple[Piece, ...]


class TensorSource(Protocol):
    """Interface to named tensors that can be read one at a time, whole or in part."""

    def shapes(self) -> Mapping[str, tuple[torch.dtype, Sizes]]:
        """Return dtype and shape by name."""
        ...

    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Read a tensor, or a block of it; copy it, do not modify it."""
        ...


class Renamed:
    """`TensorSource` with the tensors of another under new names."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        """`names` maps new names to old; other tensors are omitted."""
        self.source, self.names = source, names

    def shapes(self) -> dict[str, tuple[torch.dtype, Sizes]]:
        """Return dtype and shape by new name."""
        found = self.source.shapes()
        return {new: found[old] for new, old in self.names.items()}

    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Read a tensor, or a block of it; copy it, do not modify it."""
        return self.source.read(self.names[name], offsets, sizes)


def xor_digest(tensor: Tensor) -> int:
    """Compute the digest of format 2: the exclusive or of the elements, widened to 64 bits."""
    if not tensor.numel():
        return 0
    wide = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return int(torch.hash_tensor(wide).item())


def digest_of_all(digests: Mapping[str, int]) -> str:
    """Combine the digests of all tensors into one."""
    lines = "".join(f"{name} {digests[name]:016x}\n" for name in sorted(digests))
    return xxhash.xxh3_64_hexdigest(lines.encode())


# --- writing ---


def write_file(path: Path, pieces: Sequence[tuple[Piece, Tensor]]) -> Written:
    """Write pieces into one file, flushed to disk.

    The order is by element size, so that each piece is aligned to its own. If a piece already has a
    digest, from when it was staged, that of its current bytes must be equal.
    """
    pieces = sorted(pieces, key=lambda pair: -pair[0].dtype.itemsize)
    header, placed = _arrange([piece for piece, _ in pieces])
    state = xxhash.xxh3_128(header)
    digests: list[int] = []
    # Hashing is faster than writing: a second thread does it concurrently.
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        _write_all(file, memoryview(header))
        hashing = []
        for piece, tensor in pieces:
            host = tensor.detach().cpu().contiguous()
            data = memoryview(host.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            hashing.append(hasher.submit(_hash, state, host, piece.offsets, data))
            _write_all(file, data)
        store_of(path).flush(file)
        digests = [future.result() for future in hashing]
        size = file.tell()
    for piece, now in zip(placed, digests, strict=True):
        if piece.digest not in (None, now):
            raise Damaged(f"{path}: {piece.name} changed between the end of the step and the write")
    done = tuple(p._replace(digest=now) for p, now in zip(placed, digests, strict=True))
    return Written(path.name, File(size, state.hexdigest()), done)


def _hash(state: Any, host: Tensor, offsets: Sizes, data: memoryview) -> int:
    state.update(data)
    return unsigned(int(digest(host, offsets).item()))


def _write_all(file: RawIOBase, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _arrange(pieces: Sequence[Piece]) -> tuple[bytes, list[Piece]]:
    """Return the header of a safetensors file, and the pieces with their offsets in the file."""
    sharding = {piece.name: {"saved_offsets": piece.offsets} for piece in pieces}
    assert len(sharding) == len(pieces), "a file has room for one piece of each tensor"
    about = {"format": "pt"}
    if any(piece.sizes != piece.shape for piece in pieces):
        about["DCP_SHARDING_INFO"] = json.dumps(sharding, separators=(",", ":"))
    entries: dict[str, Any] = {"__metadata__": about}
    at, begins = 0, []
    for piece in pieces:
        end = at + torch.Size(piece.sizes).numel() * piece.dtype.itemsize
        begins.append(at)
        entries[piece.name] = {
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


def index_of(written: Iterable[Written], here: Collection[str]) -> dict[str, Any]:
    """Return the content of tensors.json, of whose pieces only those in the files `here` count.

    Each node may have written a piece; it is in the digest of its tensor once.
    """
    index: dict[str, Any] = {}
    digested: set[tuple[str, Sizes]] = set()
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
            if (piece.name, piece.offsets) not in digested:
                digested.add((piece.name, piece.offsets))
                entry["digest"] = unsigned(entry["digest"] + (piece.digest or 0))
            if one.name in here:
                entry["pieces"].append([one.name, piece.begin, piece.offsets, piece.sizes])
    return {
        name: entry | {"digest": f"{entry['digest']:016x}"} for name, entry in sorted(index.items())
    }


def digest_of_index(index: Mapping[str, Any]) -> str:
    """Return one digest of all tensors."""
    return digest_of_all({name: int(entry["digest"], 16) for name, entry in index.items()})


def write_tensors(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    about: Mapping[str, Any],
    max_shard_bytes: int,
) -> None:
    """Write a checkpoint of weights alone, or of a run, into an empty folder, one file at a time.

    Args:
        about: content of train_state.json, above all the recipe; for a run also the counters.
        max_shard_bytes: maximum size of the tensors in a file, unless a single one is larger.
    """
    written: list[Written] = []
    shard: list[tuple[Piece, Tensor]] = []
    is_run = "train_state" in about
    kind = "run" if is_run else "weights"

    def flush() -> None:
        written.append(write_file(folder / f"{kind}-{len(written)}.safetensors", shard))
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
    ranks = 0 if is_run else 1  # ranks with state of their own in it
    step = state["train_state"]["step"]
    write_manifest_of(
        folder, written, written, state, step=step, model_only=not is_run, ranks=ranks, layout={}
    )


def write_manifest_of(
    folder: Path,
    written: Iterable[Written],
    here: Iterable[Written],
    state: Mapping[str, Any],
    **what: Any,
) -> Manifest:
    """Write the rest of a checkpoint whose tensors are on disk: index, state, manifest.

    Args:
        written: files of all ranks.
        here: those in this folder.
        what: fields of the manifest that do not follow from the other arguments.
    """
    files = {one.name: one.file for one in here}
    index = index_of(written, files)
    files[INDEX] = write_json(folder / INDEX, index)
    files[STATE_FILE] = write_json(folder / STATE_FILE, state)
    manifest = Manifest(digest=digest_of_index(index), files=files, **what)
    write_manifest(folder, manifest)
    return manifest


# --- reading ---

Place = TypeVar("Place")


class StoredBlock(NamedTuple, Generic[Place]):
    """Block of a tensor and its location."""

    offsets: Sizes
    sizes: Sizes
    place: Place


def join_pieces(
    dtype: torch.dtype,
    offsets: Sizes,
    sizes: Sizes,
    blocks: Iterable[StoredBlock[Place]],
    read: Callable[[StoredBlock[Place], Sizes, Sizes], Tensor],
    where: str,
) -> Tensor:
    """Assemble a part of a tensor from its blocks, without copying if it is within one of them.

    Args:
        read: reads a part of a block, given offsets in the block and sizes.
        where: checkpoint and name of the tensor, for an error.

    Raises:
        Damaged: if some elements are in no block.
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


class SavedTensors:
    """Tensors of a checkpoint of ours."""

    def __init__(self, checkpoint: Path) -> None:
        """Open a checkpoint; raise Damaged if the manifest or the index is not what was saved."""
        self.checkpoint = checkpoint
        manifest = read_manifest(checkpoint)
        self.index: dict[str, Any] = json.loads(read_whole(checkpoint, manifest, INDEX))
        self._has_xor = manifest.format == XOR_FORMAT
        self._files = files_in(checkpoint)

    def shapes(self) -> dict[str, tuple[torch.dtype, Sizes]]:
        """Return dtype and shape by name."""
        return {
            name: (getattr(torch, entry["dtype"]), tuple(entry["shape"]))
            for name, entry in self.index.items()
        }

    def is_intact(self, name: str, tensor: Tensor) -> bool:
        """Whether `tensor`, the whole tensor `name`, has the digest that was saved."""
        found = xor_digest(tensor) if self._has_xor else unsigned(int(digest(tensor).item()))
        return found == int(self.index[name]["digest"], 16)

    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Read a tensor, or a block of it: a view of the file if one piece contains it."""
        entry = self.index[name]
        dtype: torch.dtype = getattr(torch, entry["dtype"])
        sizes = tuple(entry["shape"] if sizes is None else sizes)
        offsets = (0,) * len(sizes) if offsets is None else tuple(offsets)
        blocks = [
            StoredBlock(tuple(at), tuple(shape), (file, begin))
            for file, begin, at, shape in entry["pieces"]
        ]

        def part(block: StoredBlock[tuple[str, int]], at: Sizes, shape: Sizes) -> Tensor:
            return self._files.block(block.place, dtype, contiguous(block.sizes), at, shape)

        return join_pieces(dtype, offsets, sizes, blocks, part, f"{self.checkpoint}: {name}")
