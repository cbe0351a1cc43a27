"""Weights in the format of Hugging Face transformers: safetensors files and a `config.json`.

    config.json                        the network
    generation_config.json             the tokens that start and end a text
    model-00001-of-00004.safetensors   tensors; `model.safetensors` if there is only one file
    model.safetensors.index.json       the file of each tensor
    tokenizer.json, ...                the tokenizer, if it is known

`AutoModelForCausalLM.from_pretrained` loads the written files and returns the same logits.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint.dcp.reader import INDEX, DcpCheckpoint
from torchtitan.checkpoint.ranges import (
    Kind,
    Piece,
    Sizes,
    Stored,
    TensorSource,
    contiguous,
    files_in,
    read_header,
)
from torchtitan.checkpoint.storage import in_shards, write_file
from torchtitan.checkpoint.weights.extras import BYTES, Extras, write_json
from torchtitan.checkpoint.weights.foreign import ForeignWeights, Translated, unwrapped
from torchtitan.checkpoint.weights.network import Network, identify, read_config
from torchtitan.config import ConfigError, RecipeError, shorten
from torchtitan.logging import logger
from torchtitan.models.spec import ModelSpec
from torchtitan.remote import dangling

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER = "torchtitan_tokenizer"
"""Key of `config.json` that is "bytes" if the model needs no file of a tokenizer."""
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 5 * 10**9


class HuggingFaceWeights(ForeignWeights):
    """Weights in such a folder, under our names."""

    def __init__(
        self, folder: Path, specs: Collection[ModelSpec[Any]], flavor: str | None = None
    ) -> None:
        """Open the weights of one of `specs`, and of this `flavor` if one is given."""
        network, self.config = identify(folder / CONFIG, "hf", specs, flavor)
        self.folder = folder
        self._files = files_in(folder)
        places: dict[str, tuple[str, Stored]] = {}
        for file in _file_names(folder):
            for name, stored in read_header(folder / file, self._files).tensors.items():
                if name in places:
                    raise ConfigError(
                        f"{folder}: {name} is in both {places[name][0]} and {file}; remove one"
                    )
                places[name] = file, stored
        names = unwrapped(folder, places, _wanted(network))
        self._places = {name: places[theirs] for name, theirs in names.items()}
        kinds: dict[str, Kind | str] = {
            name: (stored.dtype, stored.shape) if stored.dtype else f"has dtype {stored.code}"
            for name, (_, stored) in self._places.items()
        }
        try:
            super().__init__(folder, network, "hf", kinds)
        except RecipeError as error:
            shapes = {name: stored.shape for name, (_, stored) in self._places.items()}
            contradictions = [*_contradictions(self.config, shapes)]
            head, embedding = "lm_head.weight", "model.embed_tokens.weight"
            if embedding in shapes and head in network.tensors("hf")[0].keys() - shapes.keys():
                tied = f"{CONFIG}: tie_word_embeddings false, and the weights have no {head}"
                contradictions.append(f"  {tied}")
            raise RecipeError([*error.lines, *contradictions]) from None

    def extras(self) -> Extras:
        """Return the data that accompanies the weights."""
        has_generation = (self.folder / GENERATION).is_file()
        return Extras.in_folder(
            self.folder,
            seq_len=self.config.get("max_position_embeddings"),
            bos=self.config.get("bos_token_id"),
            eos=self.config.get("eos_token_id"),
            generation=read_config(self.folder / GENERATION) if has_generation else None,
            is_bytes=self.config.get(TOKENIZER) == BYTES,
        )

    def _block(self, theirs: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        file, stored = self._places[theirs]
        assert stored.dtype is not None, "refused when it was opened"
        strides = contiguous(stored.shape)
        return self._files.block((file, stored.begin), stored.dtype, strides, offsets, sizes)


class HuggingFaceShards(ForeignWeights):
    """Weights in this format as DCP saves them: whole tensors or blocks, without `config.json`."""

    def __init__(self, folder: Path, network: Network) -> None:
        """Open the weights of `network`."""
        self.saved = DcpCheckpoint(folder)
        kinds = self.saved.shapes()
        self._theirs = unwrapped(folder, kinds, _wanted(network))
        found = {name: kinds[theirs] for name, theirs in self._theirs.items()}
        super().__init__(folder, network, "hf", found)

    def _block(self, theirs: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        return self.saved.read(self._theirs[theirs], offsets, sizes)


SIZES = {
    "vocab_size": (r"\.embed_tokens\.weight", 0),
    "hidden_size": (r"\.embed_tokens\.weight", 1),
    "intermediate_size": (r"\.(mlp\.gate_proj|block_sparse_moe\.experts\.\d+\.w1)\.weight", 0),
    "num_experts": (r"\.mlp\.gate\.weight", 0),
    "num_local_experts": (r"\.block_sparse_moe\.gate\.weight", 0),
    "num_attention_heads": (r"\.q_proj\.weight", 0),  # times the head size
    "num_key_value_heads": (r"\.k_proj\.weight", 0),  # likewise
}
"""Tensors, and the dim of them, that have the sizes in `config.json`."""


def _contradictions(config: Mapping[str, Any], shapes: Mapping[str, Sizes]) -> Iterator[str]:
    """Explain weights that do not fit by the sizes in which they and `config.json` differ."""
    blocks = {found[1] for name in shapes if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    if blocks and len(blocks) != (layers := config.get("num_hidden_layers")):
        yield f"  {CONFIG}: num_hidden_layers {layers}, and the weights have {len(blocks)} blocks"
    sizes: dict[str, float] = {
        key: shape[dim]
        for name, shape in shapes.items()
        for key, (pattern, dim) in SIZES.items()
        if re.search(f"{pattern}$", name) and dim < len(shape)
    }
    queries, heads = sizes.pop("num_attention_heads", 0), config.get("num_attention_heads")
    if "kv_lora_rank" in config or not (queries and isinstance(heads, int) and heads):
        sizes.pop("num_key_value_heads", None)
    else:
        sizes["head_dim"] = queries / heads
        if keys := sizes.get("num_key_value_heads"):
            sizes["num_key_value_heads"] = keys / sizes["head_dim"]
        usual = sizes.get("hidden_size", 0) / heads
        config = {**config, "head_dim": config.get("head_dim") or usual}
    for key, size in sizes.items():
        if (got := config.get(key)) not in (None, size):
            yield f"  {CONFIG}: {key} {got:.9g}, and the weights have {size:.9g}"


def _wanted(network: Network) -> set[str]:
    """Return the names of all tensors that a network may have."""
    constants = network.format("hf").constants(network.args)
    return {name for names in (*network.tensors("hf"), constants) for name in names}


def _file_names(folder: Path) -> list[str]:
    has_index, there = (folder / INDEX).is_file(), {path.name for path in folder.iterdir()}
    if not has_index and not (folder / SINGLE).is_file():
        lost = dangling(folder / SINGLE) or dangling(folder / INDEX)
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        only = f"; there is only {shorten(', '.join(others))}" if others else ""
        raise ConfigError(lost or f"{folder}: there is neither {INDEX} nor {SINGLE}{only}")
    names = [SINGLE]
    if has_index:
        found = read_config(folder / INDEX).get("weight_map")
        named = list(found.values()) if isinstance(found, dict) else []
        if not named or not all(map(_is_beside, named)):
            raise ConfigError(
                f"{folder / INDEX}: it has no weight_map from tensors to files in its folder"
            )
        names = sorted(set(named))
    for path in (folder / name for name in names if name not in there):
        raise ConfigError(f"{path}: there is no such file, but the index names it")
    if SINGLE in there and SINGLE not in names:
        raise ConfigError(
            f"{folder}: weights are in both {SINGLE}, which transformers would read, and the files "
            f"of {INDEX}; remove those that are not meant"
        )
    other = re.compile(r"(adapter_|pytorch_)?(model|consolidated)[\w.-]*\.(safetensors|bin|pth)")
    if others := sorted(filter(other.fullmatch, there.difference(names))):
        message, shown = "%s: weights are read from %s; not read: %s", shorten(", ".join(others))
        logger.warning(message, folder, names[0] if len(names) == 1 else INDEX, shown)
    return names


def _is_beside(name: object) -> bool:
    """Whether `name` is that of a file in the same folder."""
    return isinstance(name, str) and Path(name).name == name and "\0" not in name


def write_hugging_face(
    folder: Path,
    source: TensorSource,
    network: Network,
    extras: Extras,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write our weights into a folder, with at most one file of them in memory.

    `dtype` is that of all tensors; None: each keeps its own. A larger tensor has a file of its own.
    """
    weights = Translated(source, network, "hf", dtype)
    kinds = weights.shapes()
    shards = list(in_shards(kinds, lambda name: _bytes(kinds[name]), max_shard_bytes))
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        # Unnamed, so that the tensors are freed before the next are read.
        write_file(folder / file, [(Piece.whole(n, *kinds[n]), weights.read(n)) for n in names])
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
    about |= {TOKENIZER: BYTES} if extras.is_bytes else {}
    write_json(folder / CONFIG, weights.format.config(network.args, extras.seq_len) | about)
    if has_tokens:
        write_json(folder / GENERATION, extras.generation or tokens)
    extras.copy_tokenizer(folder)


def _bytes(kind: Kind) -> int:
    dtype, shape = kind
    return torch.Size(shape).numel() * dtype.itemsize
