"""The weighted mean of the weights of checkpoints: `torchtitan checkpoint merge`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint.storage import TensorSource
from torchtitan.checkpoint.store import NAME
from torchtitan.checkpoint.weights.conversion import (
    MAX_SHARD_SIZE,
    complete_or_absent,
    parse_size,
    write_ours,
)
from torchtitan.checkpoint.weights.foreign import weights_of
from torchtitan.checkpoint.weights.network import unlike
from torchtitan.checkpoint.weights.opening import OPEN, Opened, find, find_format
from torchtitan.config import ConfigError, RecipeError


class Mean:
    """`TensorSource` with the weighted mean of the tensors of others, computed in float64."""

    def __init__(self, sources: Sequence[TensorSource], weights: Sequence[float]) -> None:
        """`weights` need not add up to 1."""
        self.sources = sources
        self.weights = [weight / math.fsum(weights) for weight in weights]

    def shapes(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape by name, as in the first source."""
        return self.sources[0].shapes()

    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Read the tensors of this name, or a block of each, and return their mean."""
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
    """Write the weighted mean of the weights of checkpoints, one tensor at a time.

    The result is a checkpoint of weights alone: a `checkpoint.initial_load_path`.

    Args:
        checkpoints: folders of weights of one network, in any format.
        weights: one for each of them; they need not add up to 1.
        about: origin to record in the result.

    Raises:
        ConfigError: with all problems, before anything is written.
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
    if problems := [
        f"  {path}: {line}"
        for path, other in zip(checkpoints[1:], opened[1:], strict=True)
        for line in _unlike(other, first)
    ]:
        raise RecipeError([f"not the network of {checkpoints[0]}:", *problems])
    for each in opened:
        weights_of(each.source, each.network)
    source = Mean([each.source for each in opened], weights)
    origin = {**about, "merged_from": dict(zip(map(str, checkpoints), weights, strict=True))}
    with complete_or_absent(destination) as folder:
        most = parse_size(MAX_SHARD_SIZE)
        write_ours(folder, source, first.network, first.extras, None, None, most, origin)


def chosen(folders: Sequence[Path], steps: Sequence[int]) -> list[Path]:
    """Return the checkpoints of these steps in each folder; without steps, the newest of each.

    Raises:
        ConfigError: with the steps that a folder has, if one is not there.
    """
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


def _unlike(other: Opened, first: Opened) -> list[str]:
    """Return in what two networks differ."""
    if other.network.spec.name != first.network.spec.name:
        return [f"its model is {other.network.spec.name} instead of {first.network.spec.name}"]
    return unlike(other.network.args, first.network.args)
