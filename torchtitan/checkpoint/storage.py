"""Tensors in files: every rank writes its blocks into one file, and reads the blocks it needs.

    rank-3.safetensors   the blocks that rank 3 wrote, in the safetensors format

Which blocks these are follows from the manifest (see `layout`), and where they are in the file from
its header; nothing describes all blocks of all files. DCP's own files are pickles, which may run
anything when they are read; these are numbers and JSON. A file with parts of tensors has in its
header, as DCP's safetensors do, the offset of each block in the whole tensor: torch alone can load
them, by `torch.distributed.checkpoint.HuggingFaceStorageReader`.

A file is written and hashed at the same time. The digest of a tensor is the sum of its blocks'
digests, however it is cut (`torchtitan.digest`), so it does not depend on the layout. Checkpoints
of formats 2 and 3 have the places of all blocks in `tensors.json`. In format 2 the digest was the
exclusive or of the bits of all elements, which does not depend on their order; such checkpoints are
verified by it.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from torchtitan.checkpoint.folder import TrainState
from torchtitan.checkpoint.layout import (
    PlacedTensor,
    Placement,
    Ranges,
    RankGroup,
    names_of,
    read_groups,
)
from torchtitan.checkpoint.manifest import (
    FORMAT,
    STATE_FILE,
    XOR_FORMAT,
    Damaged,
    File,
    Manifest,
    parsing,
    read_manifest,
    read_whole,
    write_json,
    write_manifest,
)
from torchtitan.checkpoint.ranges import (
    CODES,
    SHARDING,
    Files,
    Header,
    Kind,
    Piece,
    Sizes,
    StoredBlock,
    TensorSource,
    contiguous,
    files_in,
    join_pieces,
    read_header,
)
from torchtitan.checkpoint.store import MANIFEST, store_of
from torchtitan.digest import digest, unsigned

INDEX = "tensors.json"
T = TypeVar("T")


@dataclass(frozen=True)
class Written:
    """File of tensors, and the digests of its blocks by name."""

    name: str
    file: File
    digests: Mapping[str, int]


class Renamed(TensorSource):
    """Tensors of another source under new names."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        """`names` maps new names to old; other tensors are omitted."""
        self.source, self.names, kinds = source, names, source.shapes()
        self.kinds = {new: kinds[old] for new, old in names.items()}

    def part(self, name: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        return self.source.read(self.names[name], offsets, sizes)


def xor_digest(tensor: Tensor) -> int:
    """Compute the digest of format 2: the exclusive or of the elements, widened to 64 bits."""
    if not tensor.numel():
        return 0
    wide = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return int(torch.hash_tensor(wide).item())


def digest_of_all(digests: Mapping[str, Any]) -> str:
    """Combine the digests of all items into one; of `*` each rank has one."""
    found: dict[str, int] = {}
    for key, each in digests.items():
        if isinstance(each, Mapping):
            found |= {key.replace("*", str(rank), 1): part for rank, part in each.items()}
        else:
            found[key] = each
    lines = "".join(f"{name} {found[name]:016x}\n" for name in sorted(found))
    return xxhash.xxh3_64_hexdigest(lines.encode())


# --- writing ---


def write_file(path: Path, pieces: Sequence[tuple[Piece, Tensor]]) -> Written:
    """Write pieces into one file, flushed to disk.

    The order is by element size, so that each piece is aligned to its own. If a piece already has a
    digest, from when it was staged, that of its current bytes must be equal.
    """
    pieces = sorted(pieces, key=lambda pair: -pair[0].dtype.itemsize)
    header = arrange([piece for piece, _ in pieces])
    state = xxhash.xxh3_128(header)
    # Hashing is faster than writing: a second thread does it concurrently.
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        write_all(file, memoryview(header))
        hashing = []
        for piece, tensor in pieces:
            host = tensor.detach().cpu().contiguous()
            data = memoryview(host.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            hashing.append(hasher.submit(_hash, state, host, piece.offsets, data))
            write_all(file, data)
        store_of(path).flush(file)
        digests = [future.result() for future in hashing]
        size = file.tell()
    for (piece, _), now in zip(pieces, digests, strict=True):
        if piece.digest not in (None, now):
            raise Damaged(f"{path}: {piece.name} changed between the end of the step and the write")
    found = {piece.name: now for (piece, _), now in zip(pieces, digests, strict=True)}
    return Written(path.name, File(size, state.hexdigest()), found)


def _hash(state: Any, host: Tensor, offsets: Sizes, data: memoryview) -> int:
    state.update(data)
    return unsigned(int(digest(host, offsets).item()))


def write_all(file: RawIOBase, data: memoryview) -> None:
    """Write `data`, of which a file may take a part at a time."""
    while data:
        data = data[file.write(data) :]


def arrange(pieces: Sequence[Piece]) -> bytes:
    """Return the header of a safetensors file."""
    sharding = {piece.name: {"saved_offsets": piece.offsets} for piece in pieces}
    assert len(sharding) == len(pieces), "a file has room for one piece of each tensor"
    about = {"format": "pt"}
    if any(piece.sizes != piece.shape for piece in pieces):
        about[SHARDING] = json.dumps(sharding, separators=(",", ":"))
    entries: dict[str, Any] = {"__metadata__": about}
    at = 0
    for piece in pieces:
        end = at + math.prod(piece.sizes) * piece.dtype.itemsize
        entries[piece.name] = {
            "dtype": CODES[piece.dtype],
            "shape": piece.sizes,
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def in_shards(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield items in order, as many together as fit into `most` bytes, or one that is larger."""
    shard: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if shard and total + size > most:
            yield shard
            shard, total = [], 0
        shard.append(item)
        total += size
    if shard:
        yield shard


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
    files: dict[str, File] = {}
    groups: list[RankGroup] = []
    digests: dict[str, int] = {}
    is_run = "train_state" in about
    kind = "run" if is_run else "weights"
    for shard in in_shards(tensors, lambda pair: pair[1].nbytes, max_shard_bytes):
        path = folder / f"{kind}-{len(files)}.safetensors"
        written = write_file(path, [(Piece.whole(n, t.dtype, t.shape), t) for n, t in shard])
        items = {n: PlacedTensor(t.dtype, tuple(t.shape), None) for n, t in shard}
        shard.clear()  # before the next tensors are read
        groups.append(RankGroup([len(files)], items))
        files[written.name] = written.file
        digests |= written.digests
    state = {"train_state": asdict(TrainState()), **about}
    ranks = 0 if is_run else 1  # ranks with state of their own in it
    step = state["train_state"]["step"]
    what = {"step": step, "model_only": not is_run, "ranks": ranks, "layout": {}}
    write_manifest_of(folder, files, state, groups, digests, **what)


def write_manifest_of(
    folder: Path,
    files: Mapping[str, File],
    state: Mapping[str, Any],
    groups: Sequence[RankGroup],
    digests: Mapping[str, Any],
    **what: Any,
) -> Manifest:
    """Write the rest of a checkpoint whose `files` of tensors are on disk: state and manifest.

    `digests` are by the names of the items of the groups (see `WritePlan.digests`); `what` has the
    fields of the manifest that do not follow from the other arguments.
    """
    placements: list[Placement] = []
    described = [group.to_json(placements, digests) for group in groups]
    manifest = Manifest(
        digest=digest_of_all(digests),
        files={**files, STATE_FILE: write_json(folder / STATE_FILE, state)},
        groups=described,
        placements=placements,
        **what,
    )
    write_manifest(folder, manifest)
    return manifest


# --- reading ---


class Indexed:
    """Places of the blocks of a checkpoint of format 2 or 3, by its index."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self.index: dict[str, Any] = json.loads(read_whole(checkpoint, manifest, INDEX))
        self.shapes: dict[str, Kind] = {}
        self.digests: dict[str, int] = {}
        for name, entry in self.index.items():
            self.shapes[name] = getattr(torch, entry["dtype"]), tuple(entry["shape"])
            self.digests[name] = int(entry["digest"], 16)

    def blocks(self, name: str, wanted: Ranges) -> list[StoredBlock[tuple[str, int]]]:
        """Return blocks of a tensor with their files and offsets, at least those `wanted`."""
        return [
            StoredBlock(tuple(at), tuple(shape), (file, begin))
            for file, begin, at, shape in self.index[name]["pieces"]
        ]


class Placed:
    """Places of the blocks of a checkpoint, by its manifest and the headers of its files."""

    def __init__(self, checkpoint: Path, manifest: Manifest, files: Files) -> None:
        self.checkpoint, self._files, self._rows = checkpoint, files, manifest.files
        with parsing(checkpoint / MANIFEST):
            groups, self.digests = read_groups(manifest.groups, manifest.placements)
        ranks = [rank for each in manifest.here for rank in range(*each)]
        self._here = frozenset(ranks) if ranks else None
        self.shapes: dict[str, Kind] = {}
        self._groups: dict[str, list[tuple[RankGroup, int]]] = {}
        for group in groups:
            for key, item in group.items.items():
                for rank, name in zip(group.ranks, names_of(key, group.ranks)):  # noqa: B905
                    self.shapes[name] = item.dtype, item.shape
                    self._groups.setdefault(name, []).append((group, rank))
        tensors = (name for name in manifest.files if name.endswith(".safetensors"))
        self._prefix = next(tensors, "").rpartition("-")[0]
        self._headers: dict[str, Header] = {}

    def blocks(self, name: str, wanted: Ranges) -> list[StoredBlock[tuple[str, int]]]:
        """Return the blocks of a tensor that overlap `wanted`, with their files and offsets."""
        for group, rank in self._groups[name]:
            if name not in group.items:
                shape = self.shapes[name][1]
                return [self._stored(name, StoredBlock((0,) * len(shape), shape, rank))]
            others = [each for each, _ in self._groups[name]]
            found = group.find(name, wanted, self._here, others)
            if found is not None:
                return [self._stored(name, block) for block in found]
        raise Damaged(f"{self.checkpoint}: {name}: the files of other nodes have it")

    def _stored(self, name: str, block: StoredBlock[int]) -> StoredBlock[tuple[str, int]]:
        file = f"{self._prefix}-{block.place}.safetensors"
        path = self.checkpoint / file
        if file not in self._rows:
            raise Damaged(f"{self.checkpoint / MANIFEST}: damaged: it has no {file}")
        if file not in self._headers:
            self._headers[file] = read_header(path, self._files)
        header = self._headers[file]
        wanted = self.shapes[name][0], block.sizes, block.offsets
        with parsing(path, f"it does not tell where {name} is: "):
            stored = header.tensors[name]
            found = stored.dtype, stored.shape, header.offsets(name)
        if found != wanted:
            told = "is {} {} at {}"
            there, here = told.format(*found), told.format(*wanted)
            raise Damaged(f"{path}: damaged: {name} {there}, and {here} by {MANIFEST}")
        return StoredBlock(block.offsets, block.sizes, (file, stored.begin))


class SavedTensors(TensorSource):
    """Tensors of a checkpoint of ours."""

    def __init__(self, checkpoint: Path) -> None:
        """Open a checkpoint; raise Damaged if its manifest is not what was saved."""
        self.checkpoint = checkpoint
        manifest = read_manifest(checkpoint)
        self._has_xor = manifest.format == XOR_FORMAT
        self._files = files_in(checkpoint)
        self._places: Indexed | Placed
        if manifest.format == FORMAT:
            self._places = Placed(checkpoint, manifest, self._files)
        else:
            self._places = Indexed(checkpoint, manifest)
        self.kinds = self._places.shapes

    def is_intact(self, name: str, tensor: Tensor) -> bool:
        """Whether `tensor`, the whole tensor `name`, has the digest that was saved."""
        found = xor_digest(tensor) if self._has_xor else unsigned(int(digest(tensor).item()))
        return found == self._places.digests[name]

    def part(self, name: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        dtype = self.kinds[name][0]
        wanted = tuple(range(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        blocks = self._places.blocks(name, wanted)

        def read(block: StoredBlock[tuple[str, int]], at: Sizes, shape: Sizes) -> Tensor:
            return self._files.block(block.place, dtype, contiguous(block.sizes), at, shape)

        return join_pieces(dtype, offsets, sizes, blocks, read, f"{self.checkpoint}: {name}")
