"""Converts weights from one format to another: `torchtitan checkpoint convert`.

Each format has one way to open a folder and one to write it, and a `TensorSource` with our names
connects them. So nothing here knows two formats at once, and never more of a model is in memory
than one file of it. The destination gets its name once it is complete.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchtitan.checkpoint.folder import commit, sync
from torchtitan.checkpoint.storage import write_weights
from torchtitan.checkpoint.weights.foreign import cast, weights_of
from torchtitan.checkpoint.weights.hugging_face import write_hugging_face
from torchtitan.checkpoint.weights.meta import write_meta
from torchtitan.checkpoint.weights.network import unsaid, without_flavor
from torchtitan.checkpoint.weights.opening import OPEN, Opened, find_format
from torchtitan.config import ConfigError
from torchtitan.logging import logger

FORMATS = ("ours", "hf", "meta")
DTYPES = ("bfloat16", "float16", "float32")
MAX_SHARD_SIZE = "5GB"


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The options of a conversion; None: as it follows from the weights."""

    source_format: str | None = None
    target_format: str | None = None
    model: str | None = None
    flavor: str | None = None
    dtype: str | None = None
    max_shard_size: str | None = None


def convert(
    source: Path, destination: Path, options: ConvertOptions, about: Mapping[str, Any]
) -> None:
    """Write the weights in `source` to `destination`, which must not exist yet.

    Args:
        about: what a checkpoint of ours records about its origin.

    Raises:
        ConfigError: with all problems; then nothing was written.
    """
    kind = options.source_format or find_format(source)
    target = options.target_format or ("hf" if kind == "ours" else "ours")
    if destination.exists():
        raise ConfigError(f"{destination}: already exists; nothing was written")
    if options.max_shard_size and target == "meta":
        raise ConfigError(
            "--max-shard-size: not supported with Meta's format, which is written as one file"
        )
    most = parse_size(options.max_shard_size or MAX_SHARD_SIZE)
    opened = OPEN[kind](source, options.model, options.flavor)
    network, dtype = opened.network, getattr(torch, options.dtype) if options.dtype else None
    logger.info("%s: %s in the format %s", source, network, kind)
    with complete_or_absent(destination) as folder:
        if target == "hf":
            write_hugging_face(folder, *opened, dtype, most)
        elif target == "meta":
            write_meta(folder, *opened, dtype)
        else:
            write_ours(
                folder, opened, dtype, most, {**about, "converted_from": str(source.resolve())}
            )
    for line in unsaid(network, target) if target != "ours" else ():
        logger.warning("the format %s cannot express this: %s", target, line)
    total = sum(torch.Size(shape).numel() for shape in network.parameters().values())
    logger.info("%s: %s parameters in the format %s", destination, f"{total:,}", target)


def write_ours(
    folder: Path,
    opened: Opened,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    about: Mapping[str, Any],
) -> None:
    """Write a checkpoint of ours with only weights: a `checkpoint.initial_load_path`."""
    source, network, extras = opened
    if network.flavor is None:
        raise without_flavor(network)
    recipe = {**network.recipe(), **extras.recipe()}
    names = weights_of(source, network)
    write_weights(
        folder,
        ((f"model.{n}", cast(n, source.read(f"model.{n}"), dtype)) for n in names),
        {**about, "recipe": recipe},
        max_shard_bytes,
    )


@contextmanager
def complete_or_absent(destination: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name once everything in it is on disk."""
    saving = destination.with_name(f"{destination.name}.saving")
    shutil.rmtree(saving, ignore_errors=True)
    saving.mkdir(parents=True)
    try:
        yield saving
        for path in saving.iterdir():
            sync(path)
        commit(saving)
    finally:
        shutil.rmtree(saving, ignore_errors=True)


def parse_size(text: str) -> int:
    """Bytes of "5GB" or "512MiB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", text, re.IGNORECASE)
    size = 0.0
    if match:
        unit = 1024 if match[3] else 1000
        size = float(match[1]) * unit ** " KMGT".index(match[2].upper() or " ")
    if size < 1:
        raise ConfigError(f"--max-shard-size: got {text}; wanted a size such as 5GB or 512MiB")
    return int(size)
