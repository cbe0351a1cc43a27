"""Converts weights from one format to another: `torchtitan checkpoint convert`.

Each format has one way to open a folder and one to write it, and a `TensorSource` with our names
connects them. So no code knows two formats at once, and at most one file of a model is in memory.
The destination gets its name once it is complete.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint.dcp.torchtitan import write_torchtitan
from torchtitan.checkpoint.ranges import Sizes
from torchtitan.checkpoint.storage import Renamed, TensorSource, write_all, write_tensors
from torchtitan.checkpoint.store import DISK, MANIFEST, NAME, OBJECTS
from torchtitan.checkpoint.weights.extras import Extras
from torchtitan.checkpoint.weights.foreign import cast, weights_of
from torchtitan.checkpoint.weights.hugging_face_files import CONFIG, write_hugging_face
from torchtitan.checkpoint.weights.meta_files import PARAMS, write_meta
from torchtitan.checkpoint.weights.network import Network, not_expressed, unlike
from torchtitan.checkpoint.weights.opening import (
    FOREIGN,
    OPEN,
    Opened,
    find,
    find_format,
    open_dcp_of,
)
from torchtitan.config import ConfigError, RecipeError
from torchtitan.logging import logger
from torchtitan.optim.average import AVERAGE
from torchtitan.remote import PART, RemotePath

FORMATS = ("ours", "hf", "meta", "dcp")
DTYPES = ("bfloat16", "float16", "float32")
MAX_SHARD_SIZE = "5GB"
SECTION = "model_section.toml"
"""File with the section `[model]` for weights that come from other software."""
LAST = (MANIFEST, ".metadata", CONFIG, PARAMS)
"""Files that are uploaded after all others."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of a conversion; None: derived from the weights."""

    source_format: str | None = None
    target_format: str | None = None
    model: str | None = None
    flavor: str | None = None
    recipe: Mapping[str, Any] | None = None
    """Recipe that the weights were trained with, by dotted keys, if they do not record it."""
    dtype: str | None = None
    max_shard_size: str | None = None
    with_optimizer: bool = False
    average: bool = False
    """Whether to write the average of the weights that the run kept, in their place."""


def convert(
    source: Path, destination: Path, options: ConvertOptions, about: Mapping[str, Any]
) -> str | None:
    """Write the weights in `source` to `destination`, which must not exist yet.

    Returns the section `[model]` of recipes that start from the result, as TOML, if it is our
    format of weights that no run of ours trained; it is also written, as `model_section.toml`.
    `about` is the origin to record in a checkpoint of ours. All problems are raised before anything
    is written.
    """
    kind = options.source_format or find_format(source)
    target = options.target_format or ("hf" if kind == "ours" else "ours")
    if destination.exists():
        raise ConfigError(f"{destination}: already exists; nothing was written")
    if problem := _misuse(options, kind, target):
        raise ConfigError(problem)
    most = parse_size(options.max_shard_size or MAX_SHARD_SIZE)
    if options.recipe is None:
        opened = OPEN[kind](source, options.model, options.flavor)
    else:
        opened = open_dcp_of(source, options.recipe)
    if options.average:
        opened = averaged(opened, source)
    tensors, network, extras, _ = opened
    lost = not_expressed(network, target) if target in ("hf", "meta") else []
    section = model_section(network, extras) if kind in FOREIGN and target == "ours" else None
    dtype = getattr(torch, options.dtype) if options.dtype else None
    state = _state_of_run(source, destination, opened) if options.with_optimizer else None
    logger.info("%s: %s in the format %s", source, network, kind)
    with complete_or_absent(destination) as folder:
        if target == "hf":
            write_hugging_face(folder, tensors, network, extras, dtype, most)
        elif target == "meta":
            write_meta(folder, tensors, network, extras, dtype)
        elif target == "dcp":
            write_torchtitan(folder, tensors, network, state, dtype, most)
        else:
            origin = {**about, "converted_from": str(source.resolve())}
            write_ours(folder, tensors, network, extras, state, dtype, most, origin)
        if section is not None:
            (folder / SECTION).write_text(section, encoding="utf-8")
    for line in lost:
        logger.warning("the format %s cannot express this: %s", target, line)
    total = sum(torch.Size(shape).numel() for shape in network.parameters().values())
    logger.info("%s: %s parameters in the format %s", destination, f"{total:,}", target)
    return section


def model_section(network: Network, extras: Extras) -> str:
    """Return the section `[model]` that selects a network and its tokenizer, as TOML."""
    import tomlkit

    section = network.section()
    if extras.tokenizer is not None:
        section["tokenizer_path"] = str(extras.tokenizer)
    text: str = tomlkit.dumps({"model": section})
    if extras.tokenizer is None and not extras.is_bytes:
        text += (
            "# tokenizer_path: there was none next to the weights; without it, tokens are bytes\n"
        )
    return text


def _misuse(options: ConvertOptions, kind: str, target: str) -> str | None:
    """Return why options do not match the two formats or each other, or None."""
    if options.max_shard_size and target == "meta":
        return "--max-shard-size: not supported with Meta's format, which is written as one file"
    if options.with_optimizer and {kind, target} != {"ours", "dcp"}:
        return (
            f"--with-optimizer: not supported from {kind} to {target}; supported from ours to dcp, "
            "and back"
        )
    if options.with_optimizer and options.dtype:
        return (
            "--with-optimizer: not supported with --dtype, as another dtype would change the "
            "run; leave one out"
        )
    if options.average and kind != "ours":
        return f"--average: not supported from {kind}; a run of ours can keep an average"
    if options.average and options.with_optimizer:
        return "--average: not supported with --with-optimizer, whose states are of the weights"
    if options.recipe is not None and kind != "dcp":
        return f"--recipe: not supported from {kind}, which records its sizes; leave it out"
    if options.recipe is not None and (options.model or options.flavor):
        return "--recipe: it already selects the model; leave out --model and --flavor"
    return None


def _state_of_run(source: Path, destination: Path, opened: Opened) -> Mapping[str, Any]:
    """Return the state of a run besides its tensors, after checking the name `destination`."""
    if opened.state is None:
        raise ConfigError(f"--with-optimizer: {source} has only weights; leave it out")
    state = opened.state()
    named, step = re.fullmatch(r"step-(\d+)", destination.name), state["train_state"]["step"]
    if named and int(named[1]) != step:
        raise ConfigError(
            f"{destination}: wanted the name step-{step}, as the run has taken {step} steps"
        )
    return state


def averaged(opened: Opened, path: Path) -> Opened:
    """Return the average that a run kept (`optimizer.average`) as its weights."""
    names = {name: name for name in opened.source.shapes() if name.startswith("model.")}
    found = {
        f"model.{name.removeprefix('optimizer.').removesuffix(f'.{AVERAGE}')}": name
        for name in opened.source.shapes()
        if name.startswith("optimizer.") and name.endswith(f".{AVERAGE}")
    }
    if not found:
        raise ConfigError(
            f"--average: {path} has no average of its weights; a run with optimizer.average keeps "
            "one"
        )
    return opened._replace(source=Renamed(opened.source, names | found), state=None)


def write_ours(
    folder: Path,
    source: TensorSource,
    network: Network,
    extras: Extras,
    state: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    about: Mapping[str, Any],
) -> None:
    """Write a `checkpoint.initial_load_path`, of a run if there is its `state`, or weights."""
    state = state or {}
    recipe = {**network.recipe(), **extras.recipe(), **state.get("recipe", {})}
    names = [f"model.{name}" for name in weights_of(source, network)]
    if state:
        names += [name for name in source.shapes() if name.startswith("optimizer.")]
    write_tensors(
        folder,
        ((name, cast(name, source.read(name), dtype)) for name in names),
        {**about, **state, "recipe": recipe},
        max_shard_bytes,
    )


@contextmanager
def complete_or_absent(destination: Path) -> Iterator[Path]:
    """Yield a folder to write into, which gets its name once everything in it is on disk.

    For a store it is a temporary folder, whose files are uploaded afterwards: libraries write these
    formats to a disk.
    """
    if isinstance(destination, RemotePath):
        with TemporaryDirectory() as spool:
            message = "%s: first written to %s, which needs room for it; TMPDIR sets the place"
            logger.info(message, destination, spool)
            yield Path(spool)
            upload(Path(spool), destination)
        return
    saving = DISK.saving(destination)
    try:
        DISK.begin(saving)
    except OSError as error:
        raise ConfigError(f"{destination}: cannot be written: {error.strerror}") from None
    try:
        yield saving
        for path in saving.iterdir():
            DISK.sync(path)
        DISK.commit(saving)
    finally:
        DISK.discard(saving)


def upload(folder: Path, destination: RemotePath) -> None:
    """Upload files to a store, those that mark a folder's format last; all of them or none."""
    try:
        for path in sorted(folder.iterdir(), key=lambda path: (path.name in LAST, path.name)):
            with path.open("rb") as file, (destination / path.name).open("wb") as copy:
                while block := file.read(PART):
                    write_all(copy, memoryview(block))
    except OSError:
        OBJECTS.discard(destination)
        raise


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "5GB" or "512MiB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", text, re.IGNORECASE)
    size = 0.0
    if match:
        unit = 1024 if match[3] else 1000
        size = float(match[1]) * unit ** " KMGT".index(match[2].upper() or " ")
    if size < 1:
        raise ConfigError(f"--max-shard-size: got {text}; wanted a size such as 5GB or 512MiB")
    return int(size)


# --- the mean of several: `torchtitan checkpoint merge` ---


class Mean(TensorSource):
    """Weighted mean of the tensors of several sources, computed in float64."""

    def __init__(self, sources: Sequence[TensorSource], weights: Sequence[float]) -> None:
        """`weights` need not add up to 1."""
        self.sources, self.kinds = sources, sources[0].shapes()
        self.weights = [weight / math.fsum(weights) for weight in weights]

    def part(self, name: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        parts = (source.read(name, offsets, sizes) for source in self.sources)
        first = next(parts)
        total = first.double() * self.weights[0]
        for part, weight in zip(parts, self.weights[1:], strict=True):
            total.add_(part.double(), alpha=weight)
        return total.to(first.dtype)


def merge(
    checkpoints: Sequence[Path],
    weights: Sequence[float],
    destination: Path,
    about: Mapping[str, Any],
) -> None:
    """Write the weighted mean of checkpoints of one network, one tensor at a time.

    `checkpoints` are folders in any format; `weights` need not add up to 1; `about` is the origin
    to record. All problems are raised, as ConfigError, before anything is written.
    """
    if destination.exists():
        raise ConfigError(f"--output: {destination} exists already; nothing was written")
    if len(checkpoints) < 2:
        raise ConfigError(f"{checkpoints[0]}: got one checkpoint; wanted several, as by --steps")
    if len(weights) != len(checkpoints):
        raise ConfigError(
            f"--weights: got {len(weights)} for {len(checkpoints)} checkpoints; wanted one for each"
        )
    if not abs(math.fsum(weights)) > 1e-9 * math.fsum(map(abs, weights)):
        raise ConfigError("--weights: they add up to 0, so there is no mean")
    opened = [OPEN[find_format(path)](path, None, None) for path in checkpoints]
    first = opened[0]
    problems, name = [], first.network.spec.name
    for path, (_, other, *_) in zip(checkpoints[1:], opened[1:], strict=True):
        lines = [f"its model is {other.spec.name} instead of {name}"]
        if other.spec.name == name:
            lines = unlike(other.args, first.network.args)
        problems += [f"  {path}: {line}" for line in lines]
    if problems:
        raise RecipeError([f"not the network of {checkpoints[0]}:", *problems])
    for each in opened:
        weights_of(each.source, each.network)
    source = Mean([each.source for each in opened], weights)
    origin = {**about, "merged_from": dict(zip(map(str, checkpoints), weights, strict=True))}
    with complete_or_absent(destination) as folder:
        most = parse_size(MAX_SHARD_SIZE)
        write_ours(folder, source, first.network, first.extras, None, None, most, origin)


def chosen(folders: Sequence[Path], steps: Sequence[int]) -> list[Path]:
    """Return the checkpoints of these steps in each folder; without steps, the newest of each."""
    found = []
    for folder in folders:
        if not steps:
            found.append(find(folder)[-1] if find_format(folder) == "ours" else folder)
            continue
        named = ((NAME.fullmatch(path.name), path) for path in find(folder))
        there = {int(name[1]): path for name, path in named if name}
        if missing := [step for step in steps if step not in there]:
            lacks, has = (", ".join(map(str, each)) or "none" for each in (missing, there))
            raise ConfigError(f"--steps: {folder} has no step {lacks}; it has {has}")
        found += [there[step] for step in steps]
    return found
