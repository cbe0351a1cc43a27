"""Weights in the format of Hugging Face transformers: safetensors files and a `config.json`.

    config.json                        the network
    generation_config.json             the tokens that start and end a text
    model-00001-of-00004.safetensors   tensors; `model.safetensors` if there is only one file
    model.safetensors.index.json       the file of each tensor
    tokenizer.json, ...                the tokenizer, if it is known

`AutoModelForCausalLM.from_pretrained` loads the written files and returns the same logits.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchtitan.checkpoint.dcp.reader import DcpCheckpoint
from torchtitan.checkpoint.headers import Stored, read_header
from torchtitan.checkpoint.ranges import contiguous, files_in
from torchtitan.checkpoint.storage import TensorSource
from torchtitan.checkpoint.weights.extras import Extras, write_json
from torchtitan.checkpoint.weights.foreign import ForeignWeights, Kind, Translated
from torchtitan.checkpoint.weights.network import Network, Sizes, identify, read_config
from torchtitan.config import ConfigError
from torchtitan.logging import logger
from torchtitan.models.spec import ModelSpec

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9


class HuggingFaceWeights(ForeignWeights):
    """Weights in such a folder, under our names; see `TensorSource`."""

    def __init__(
        self, folder: Path, specs: Collection[ModelSpec[Any]], flavor: str | None = None
    ) -> None:
        """Open the weights of one of `specs`, and of this `flavor` if one is given.

        Raises:
            ConfigError: with everything that does not match.
        """
        network, self.config = identify(folder / CONFIG, "hf", specs, flavor)
        self.folder = folder
        self._files = files_in(folder)
        self._places = {
            name: (file, stored)
            for file in _file_names(folder)
            for name, stored in read_header(folder / file, self._files).tensors.items()
        }
        kinds = {name: _kind(stored) for name, (_, stored) in self._places.items()}
        super().__init__(folder, network, "hf", kinds)

    def extras(self) -> Extras:
        """Return the data that accompanies the weights."""
        has_generation = (self.folder / GENERATION).is_file()
        return Extras.beside(
            self.folder,
            seq_len=self.config.get("max_position_embeddings"),
            bos=self.config.get("bos_token_id"),
            eos=self.config.get("eos_token_id"),
            generation=read_config(self.folder / GENERATION) if has_generation else None,
        )

    def _block(self, theirs: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        file, stored = self._places[theirs]
        assert stored.dtype is not None, "refused when it was opened"
        strides = contiguous(stored.shape)
        return self._files.block((file, stored.begin), stored.dtype, strides, offsets, sizes)


class HuggingFaceShards(ForeignWeights):
    """Weights in this format as DCP saves them: whole tensors or blocks, without `config.json`."""

    def __init__(self, folder: Path, network: Network) -> None:
        """Open the weights of `network`.

        Raises:
            ConfigError: with everything that does not match.
        """
        self.saved = DcpCheckpoint(folder)
        super().__init__(folder, network, "hf", self.saved.shapes())

    def _block(self, theirs: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        return self.saved.read(theirs, offsets, sizes)


def _file_names(folder: Path) -> list[str]:
    if not (folder / INDEX).is_file():
        single = "model.safetensors"
        if not (folder / single).is_file():
            raise ConfigError(f"{folder}: there is neither {INDEX} nor {single}")
        return [single]
    weight_map = read_config(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_beside, weight_map.values())):
        raise ConfigError(f"{folder / INDEX}: it has no weight_map from tensors to files beside it")
    names, there = sorted(set(weight_map.values())), {path.name for path in folder.iterdir()}
    for path in (folder / name for name in names if name not in there):
        raise ConfigError(f"{path}: no such file, but the index names it")
    return names


def _is_beside(name: object) -> bool:
    """Whether `name` is that of a file in the same folder."""
    return isinstance(name, str) and Path(name).name == name and "\0" not in name


def _kind(stored: Stored) -> Kind | str:
    return (stored.dtype, stored.shape) if stored.dtype else f"has dtype {stored.code}"


def write_hugging_face(
    folder: Path,
    source: TensorSource,
    network: Network,
    extras: Extras,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write our weights into a folder, with at most one file of them in memory.

    Args:
        dtype: dtype of all tensors; None: each keeps its own.
        max_shard_bytes: maximum size of the tensors in a file, unless a single one is larger.
    """
    weights = Translated(source, network, "hf", dtype)
    kinds = weights.shapes()
    shards = list(_shards(kinds, max_shard_bytes))
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        # Unnamed, so that the tensors are freed before the next are read.
        save_file({name: weights.read(name) for name in names}, folder / file, {"format": "pt"})
        # safetensors makes files that only their owner can read, whatever the umask.
        (folder / file).chmod(folder.stat().st_mode & 0o666)
        places |= dict.fromkeys(names, file)
        logger.info("wrote %s", file)
    if len(shards) > 1:
        total = sum(_bytes(kind) for kind in kinds.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    first = next(iter(kinds.values()))[0]
    # Without these, a reader would use the special tokens of Llama 2.
    has_tokens = weights.format.has_tokens
    tokens = {"bos_token_id": extras.bos, "eos_token_id": extras.eos} if has_tokens else {}
    about = {**tokens, "torch_dtype": str(first).removeprefix("torch.")}
    write_json(folder / CONFIG, weights.format.config(network.args, extras.seq_len) | about)
    if has_tokens:
        write_json(folder / GENERATION, extras.generation or tokens)
    extras.copy_tokenizer(folder)


def _shards(kinds: Mapping[str, Kind], most: int) -> Iterator[list[str]]:
    """Yield the tensors of each file, in order."""
    names: list[str] = []
    size = 0
    for name, kind in kinds.items():
        if names and size + _bytes(kind) > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += _bytes(kind)
    yield names


def _bytes(kind: Kind) -> int:
    dtype, shape = kind
    return torch.Size(shape).numel() * dtype.itemsize
