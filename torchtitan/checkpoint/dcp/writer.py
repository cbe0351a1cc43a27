"""Writes the classic form of torch's distributed checkpoint (DCP), which `dcp.load` opens.

    __0_0.distcp, __0_1.distcp, ...   tensors and values, each as `torch.save` writes it
    .metadata                         their names and locations: a pickle, as torch requires

torch's own writer keeps all tensors of a file until it is complete; here one is in memory at a
time.
"""

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.torch_private.distributed import storage_info

CHUNK_BYTES = 64 * 2**20
"""Bytes of a tensor per item: a rank that needs a part of it reads whole items."""
Keys = tuple[str, ...]
"""Path of a value in nested dictionaries; joined by dots, its name."""


def write_dcp(folder: Path, items: Iterable[tuple[Keys, Any]], max_file_bytes: int) -> None:
    """Write tensors and plain values into an empty folder.

    Args:
        max_file_bytes: maximum size of a file, unless a single item is larger.
    """
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    kinds: dict[str, Any] = {}
    keys_of: dict[str, Keys] = {}
    places: dict[MetadataIndex, Any] = {}
    number, end = 0, 0
    for keys, value in items:
        name = ".".join(keys)
        keys_of[name], kinds[name] = keys, BytesStorageMetadata()
        if isinstance(value, Tensor):
            kinds[name] = TensorStorageMetadata(TensorProperties(value.dtype), value.shape, [])
        for offsets, part in _chunks(value):
            size = part.nbytes if isinstance(part, Tensor) else 0
            if end and end + size > max_file_bytes:
                number, end = number + 1, 0
            path, begin = folder / f"__0_{number}.distcp", end
            end = _append(path, part)
            places[MetadataIndex(name, offsets)] = storage_info(path.name, begin, end - begin)
            if offsets is not None:
                kinds[name].chunks.append(ChunkStorageMetadata(offsets, part.shape))
        del value, part  # before the next is read
    metadata = Metadata(kinds, keys_of, places, StorageMeta(), "1.0.0")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _chunks(value: Any) -> Iterator[tuple[torch.Size | None, Any]]:
    """Yield blocks of rows of a tensor with their offsets; anything else unchanged."""
    if not isinstance(value, Tensor):
        yield None, value
    elif value.nbytes <= CHUNK_BYTES or not value.ndim:
        yield torch.Size([0] * value.ndim), value
    else:
        rows = max(CHUNK_BYTES * len(value) // value.nbytes, 1)
        for at in range(0, len(value), rows):
            yield torch.Size([at] + [0] * (value.ndim - 1)), value[at : at + rows]


def _append(path: Path, value: Any) -> int:
    """Append an item to a file; return the new length of the file."""
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() != value.nbytes:
        value = value.clone()  # else its whole storage would be written
    with path.open("ab") as file:
        torch.save(value, file)
        return file.tell()
