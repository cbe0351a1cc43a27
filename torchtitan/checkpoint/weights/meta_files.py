"""Weights as published by Meta: `consolidated.00.pth` and so on, and `params.json`.

Several files are the ranks of tensor parallelism (Megatron-LM, https://arxiv.org/abs/1909.08053):
every file holds a block of each matrix, of its rows or of its columns, and small tensors are the
same in all of them, as the shapes tell. The files are pickles; torch reads them without executing
anything in them, and maps the tensors into memory instead of loading them.
"""

import pickle
from collections.abc import Collection, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint.ranges import Kind, Sizes, StoredBlock, TensorSource, join_pieces
from torchtitan.checkpoint.weights.extras import Extras, write_json
from torchtitan.checkpoint.weights.foreign import ForeignWeights, Translated, unwrapped
from torchtitan.checkpoint.weights.network import Network, identify
from torchtitan.config import ConfigError
from torchtitan.models.spec import ModelSpec
from torchtitan.remote import RemotePath, refuse_pointer

PARAMS = "params.json"


class MetaWeights(ForeignWeights):
    """Weights in such a folder, under our names."""

    def __init__(
        self, folder: Path, specs: Collection[ModelSpec[Any]], flavor: str | None = None
    ) -> None:
        """Open the weights of one of `specs`, and of this `flavor` if one is given."""
        if isinstance(folder, RemotePath):
            raise ConfigError(f"{folder}: Meta's files are only read from a disk; copy them to one")
        network, _ = identify(folder / PARAMS, "meta", specs, flavor)
        self.folder = folder
        files = [_load(path) for path in _paths(folder)]
        wanted, optional = network.tensors("meta")
        theirs = dict.fromkeys(name for file in files for name in file)
        self._blocks: dict[str, list[StoredBlock[Tensor]]] = {}
        found: dict[str, Kind | str] = {}
        for name, wrapped in unwrapped(folder, theirs, {*wanted, *optional}).items():
            blocks = [file[wrapped] for file in files if wrapped in file]
            whole = wanted.get(name) or optional.get(name)
            placed = _placed(blocks, whole, len(files))
            if isinstance(placed, str):
                found[name] = placed
            else:
                self._blocks[name] = placed
                found[name] = (blocks[0].dtype, whole or ())
        super().__init__(folder, network, "meta", found)

    def extras(self) -> Extras:
        """Return the data that accompanies the weights."""
        return Extras.in_folder(self.folder)

    def _block(self, theirs: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        def read(block: StoredBlock[Tensor], at: Sizes, shape: Sizes) -> Tensor:
            return block.place[tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))]

        blocks = self._blocks[theirs]
        where = f"{self.folder}: {theirs}"
        return join_pieces(blocks[0].place.dtype, offsets, sizes, blocks, read, where)


def _paths(folder: Path) -> list[Path]:
    """Return the files of the weights, verified to be complete."""
    found = sorted(folder.glob("consolidated.*.pth"))
    wanted = [folder / f"consolidated.{number:02}.pth" for number in range(len(found) or 1)]
    if found != wanted:
        missing = next(path for path in wanted if path not in found)
        raise ConfigError(f"{missing}: there is no such file")
    return found


def _load(path: Path) -> dict[str, Tensor]:
    if path.is_file():
        refuse_pointer(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise ConfigError(
            f"{path}: it contains more than tensors, which cannot be loaded without executing code"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path}: not a complete file of torch.save: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ConfigError(f"{path}: not a dictionary of tensors")
    return content


def _placed(
    blocks: list[Tensor], whole: Sizes | None, files: int
) -> list[StoredBlock[Tensor]] | str:
    """Return blocks that make the tensor, the first alone if it does, or why they do not match."""
    first, *others = blocks
    if len(blocks) < files:
        return f"is in {len(blocks)} of {files} files"
    if any(block.shape != first.shape or block.dtype != first.dtype for block in others):
        return "has another shape or dtype in another file"
    shape = tuple(first.shape)
    if whole is None or (shape == whole and all(torch.equal(block, first) for block in others)):
        return [StoredBlock((0,) * len(shape), shape, first)]
    split = [dim for dim, (a, b) in enumerate(zip(shape, whole, strict=False)) if a != b]
    if len(shape) == len(whole) and len(split) == 1 and shape[split[0]] * files == whole[split[0]]:
        steps = [size * (dim in split) for dim, size in enumerate(shape)]
        starts = (tuple(number * step for step in steps) for number in range(files))
        return [StoredBlock(at, shape, block) for at, block in zip(starts, blocks, strict=True)]
    if shape == whole:
        return "is unsharded in each file, but not the same in all"
    return f"has shape {shape}{f' in each of {files} files' if others else ''}; wanted {whole}"


def write_meta(
    folder: Path,
    source: TensorSource,
    network: Network,
    extras: Extras,
    dtype: torch.dtype | None = None,
) -> None:
    """Write our weights into a folder, as one file, with one tensor at a time in memory."""
    weights = Translated(source, network, "meta", dtype)
    save_mapped(((n, weights.read(n)) for n in weights.shapes()), folder / "consolidated.00.pth")
    write_json(folder / PARAMS, weights.format.config(network.args, extras.seq_len))
    extras.copy_tokenizer(folder, ["tokenizer.model"])


def save_mapped(tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Run `torch.save` on more tensors than memory holds, by way of files of the same size."""
    with TemporaryDirectory(dir=path.parent) as spool:
        mapped: dict[str, Tensor] = {}
        for number, (name, tensor) in enumerate(tensors):
            file = str(Path(spool) / str(number))
            tensor.reshape(-1).view(torch.uint8).numpy().tofile(file)
            flat = torch.from_file(file, size=tensor.numel(), dtype=tensor.dtype)
            mapped[name] = flat.view(tensor.shape)
        torch.save(mapped, path)
