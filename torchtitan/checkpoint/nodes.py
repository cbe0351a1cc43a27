"""Nodes of a run, as far as a folder on their disks tells them apart, and files sent between them.

Ranks that see the same files at a path are a node; one of them leads. If the path is on a disk that
all share, there is one node.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from torchtitan.checkpoint.manifest import File
from torchtitan.checkpoint.placement import on_all_ranks, on_rank_0
from torchtitan.checkpoint.store import DISK
from torchtitan.config import ConfigError
from torchtitan.logging import logger
from torchtitan.parallel import World

CHUNK = 8 * 2**20
"""Bytes that are sent at a time."""
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


class Transfer(NamedTuple):
    """A file that one rank sends to another, from and to the same path of their disks."""

    source: int
    target: int
    name: str
    file: File


def transfer(world: World, folder: Path, transfers: Sequence[Transfer]) -> None:
    """Carry out transfers, of which every rank knows all, between the nodes of `folder`.

    Raises:
        OSError: if a disk failed; all ranks raise it.
        ConfigError: if the bytes received are not those that were saved.
    """
    problems: list[Exception] = []
    # All ranks follow one order, so the first pair that is not done can always proceed.
    for each in transfers:
        path = folder / each.name
        if each.source == world.rank:
            send_file(path, each.file.bytes, each.target, world.slow_group)
        if each.target == world.rank:
            try:
                receive_file(path, each.file, each.source, world.slow_group)
            except (OSError, ConfigError) as error:
                problems.append(error)

    def settle() -> None:
        for problem in problems:
            raise problem

    on_all_ranks(world, settle)


def send_file(path: Path, size: int, rank: int, group: "dist.ProcessGroup") -> None:
    """Send a file of `size` bytes; zeros in place of what cannot be read, which its hash shows."""
    for begin in range(0, size, CHUNK):
        dist.send(_chunk(path, begin, min(CHUNK, size - begin)), rank, group)


def _chunk(path: Path, begin: int, count: int) -> Tensor:
    data = bytearray(count)
    try:
        with path.open("rb") as file:
            file.seek(begin)
            file.readinto(data)
    except OSError as error:
        logger.error("%s", error)
    return torch.frombuffer(data, dtype=torch.uint8)


def receive_file(path: Path, expected: File, rank: int, group: "dist.ProcessGroup") -> None:
    """Receive a file, flushed to disk under its name only if it is what was saved.

    All of it is received even if the disk fails, as the sender waits for that.
    """
    new, state, problem = path.with_name(f"{path.name}.new"), xxhash.xxh3_128(), None
    for begin in range(0, expected.bytes, CHUNK):
        part = torch.empty(min(CHUNK, expected.bytes - begin), dtype=torch.uint8)
        dist.recv(part, rank, group)
        data = memoryview(part.numpy())  # type: ignore[arg-type]
        state.update(data)
        try:
            with new.open("ab" if begin else "wb") as file:
                file.write(data)
                DISK.flush(file)
        except OSError as error:
            problem = problem or error
    if problem:
        raise problem
    if state.hexdigest() != expected.xxh3_128:
        raise ConfigError(f"{path}: damaged: rank {rank} sent other bytes than were saved")
    new.replace(path)
    DISK.sync(path.parent)
