"""Ranks that load, and do work for each other: nodes, errors that all meet, blocks to read.

When loading, each rank reads the blocks that it holds now, however they were sharded when they were
saved, without communication.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from torchtitan.checkpoint.ranges import TensorSource
from torchtitan.config import ConfigError
from torchtitan.parallel import World
from torchtitan.torch_private.dtensor import detached_part, is_dtensor, local_extent

T = TypeVar("T")


class Nodes:
    """Ranks by the node whose disk has a folder; a folder that all ranks share is of one node."""

    def __init__(
        self, world: World, ranks: Sequence[Sequence[int]], names: Sequence[str] = ("",)
    ) -> None:
        """`ranks`: those of each node, of which the first leads; `names`: of the nodes."""
        self.world, self.ranks, self.names = world, ranks, names
        self.here = next(each for each in ranks if world.rank in each)
        """Ranks of this rank's node."""
        self.is_leader = self.here[0] == world.rank

    def lead(self, work: Callable[[], T]) -> list[T]:
        """Return on every rank the results of `work` on the leaders; all raise the first error."""
        if len(self.ranks) == 1:
            return [on_rank_0(self.world, work)]
        value = on_all_ranks(self.world, lambda: work() if self.is_leader else None)
        everyones = self.world.gather(value)
        return [everyones[ranks[0]] for ranks in self.ranks]

    def share(self, value: T) -> T:
        """Return rank 0's value on every leader."""
        if len(self.ranks) == 1:
            return value
        shared: T = self.world.broadcast_object(value)
        return shared

    def part(self, names: Iterable[str]) -> list[str]:
        """Return this rank's part of files that its node has, which its ranks divide."""
        return sorted(names)[self.here.index(self.world.rank) :: len(self.here)]


def find_nodes(world: World, folder: Path, mark: str, host: str, key: str) -> Nodes:
    """Return the nodes of a folder, which is created where it is missing.

    Ranks that see the same files at a path are a node; if it is on a disk that all share, there is
    one node. `mark` is the start of the names of files that ranks write there, for this call alone;
    `host` the name of this rank's machine, and `key` the setting of the folder, for messages.
    """
    own = folder / f"{mark}{world.rank}"

    def write() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own.touch()
        except OSError as error:
            raise ConfigError(f"{key}: {error}") from None

    on_all_ranks(world, write)
    seen = tuple(sorted(int(path.name.removeprefix(mark)) for path in folder.glob(f"{mark}*")))
    everyones = world.gather((seen, host))
    own.unlink()
    ranks = sorted({each for each, _ in everyones})
    if sorted(rank for each in ranks for rank in each) != list(range(world.size)):
        raise ConfigError(f"{key}: ranks see different files in {folder}; use a local disk")
    hosts = [everyones[each[0]][1] for each in ranks]
    return Nodes(world, ranks, [f"node {n} ({name})" for n, name in enumerate(hosts)])


def load_into(tensors: Mapping[str, Tensor], source: TensorSource) -> None:
    """Copy the blocks of `tensors` that this rank holds from `source`, which must match."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            sizes, offsets = local_extent(tensor) if is_dtensor(tensor) else (None, None)
            detached_part(tensor).copy_(source.read(name, offsets, sizes))


class FailedOnRank(RuntimeError):
    """Unexpected error on another rank, whose own message has the traceback."""


def on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Return the result of `work`; if it fails on any rank, all raise the first rank's error.

    Raises:
        ConfigError: if data is damaged, for example, or a store failed.
        OSError: if a disk failed.
        FailedOnRank: if another rank met any other error, which that rank raises itself.
    """
    value, problem = _attempt(work)
    if not world.any([problem is not None])[0]:
        return cast(T, value)
    everyones = world.gather(_for_others(world.rank, problem))
    if isinstance(everyones[world.rank], FailedOnRank):
        raise cast(Exception, problem)
    raise next(found for found in everyones if found is not None)


def on_rank_0(world: World, work: Callable[[], T]) -> T:
    """Return on every rank the result of `work` on rank 0; raise as `on_all_ranks` does."""
    value, problem = _attempt(work) if world.rank == 0 else (None, None)
    value, found = world.broadcast_object((value, _for_others(0, problem)))
    if found is not None:
        raise problem or found
    return cast(T, value)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def attempt(work: Callable[[], T]) -> Callable[[], T]:
    """Do `work`; return a function that returns its result, or raises its error."""
    value, problem = _attempt(work)

    def outcome() -> T:
        if problem is not None:
            raise problem
        return cast(T, value)

    return outcome


def _for_others(rank: int, error: Exception | None) -> Exception | None:
    """Return the error that other ranks raise; not every error can be pickled."""
    if error is None or isinstance(error, ConfigError | OSError):
        return error
    return FailedOnRank(f"rank {rank} failed: {type(error).__name__}: {error}")


def differences(tensors: Mapping[str, Tensor], source: TensorSource) -> list[str]:
    """Return the names and shapes in which a source does not match, one line each."""
    found = source.shapes()
    mistakes = []
    for name, tensor in tensors.items():
        if name not in found:
            mistakes.append(f"{name} is not in the checkpoint")
        elif found[name][1] != tuple(tensor.shape):
            there, here = found[name][1], tuple(tensor.shape)
            mistakes.append(f"{name} is {there} there and {here} here")
    return mistakes
