"""Nodes of a run, as far as a folder on their disks tells them apart.

Ranks that see the same files at a path are a node; one of them leads. If the path is on a disk that
all share, there is one node.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from torchtitan.checkpoint.placement import on_all_ranks, on_rank_0
from torchtitan.config import ConfigError
from torchtitan.parallel import World

T = TypeVar("T")


class RankZero:
    """One leader, for a folder that all ranks share."""

    def __init__(self, world: World) -> None:
        self.world, self.is_leader = world, world.rank == 0
        self.count = 1
        """Number of leaders."""

    def lead(self, work: Callable[[], T]) -> list[T]:
        """Return on every rank the results of `work` on the leaders; all raise the first error."""
        return [on_rank_0(self.world, work)]

    def share(self, value: T) -> T:
        """Return rank 0's value on every leader."""
        return value


class Nodes(RankZero):
    """A leader on each node, for a folder that the ranks of a node share."""

    def __init__(self, world: World, ranks: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        """`ranks`: those of each node, of which the first leads; `names`: of the nodes."""
        super().__init__(world)
        self.ranks, self.names, self.count = ranks, names, len(ranks)
        self.own = next(number for number, each in enumerate(ranks) if world.rank in each)
        self.is_leader = ranks[self.own][0] == world.rank

    def lead(self, work: Callable[[], T]) -> list[T]:
        value = on_all_ranks(self.world, lambda: work() if self.is_leader else None)
        everyones = self.world.gather(value)
        return [everyones[ranks[0]] for ranks in self.ranks]

    def share(self, value: T) -> T:
        shared: T = self.world.broadcast_object(value)
        return shared

    def of_rank(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)


def find_nodes(world: World, folder: Path, mark: str, host: str, key: str) -> Nodes:
    """Return the nodes of a folder, which is created where it is missing.

    Args:
        mark: start of the names of files that ranks write there, for this call alone.
        host: name of this rank's machine.
        key: setting that names the folder, for errors.
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
