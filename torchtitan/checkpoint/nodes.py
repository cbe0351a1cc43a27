"""Nodes of a run, as far as a folder on their disks tells them apart, and bytes sent between them.

Ranks that see the same files at a path are a node; one of them leads. If the path is on a disk that
all share, there is one node.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
import xxhash

from torchtitan.checkpoint.manifest import Damaged
from torchtitan.checkpoint.placement import on_all_ranks, on_rank_0
from torchtitan.checkpoint.store import DISK
from torchtitan.config import ConfigError
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


def appending(path: Path) -> Callable[[memoryview], None]:
    """Return a function that writes a file piece by piece, from its beginning, flushed to disk."""
    modes = chain(["wb"], repeat("ab"))

    def write(data: memoryview) -> None:
        with path.open(next(modes)) as file:
            file.write(data)
        DISK.sync(path)

    return write


class Span(NamedTuple):
    """Bytes of a file."""

    name: str
    begin: int
    size: int


class Transfer(NamedTuple):
    """Bytes that one rank reads in a folder and sends to another, one span after the other."""

    source: int
    target: int
    spans: tuple[Span, ...]


def transfer(
    world: World, folder: Path, transfers: Sequence[Transfer], take: Callable[[memoryview], object]
) -> None:
    """Carry out transfers, of which every rank knows all; `take` is called with what arrives here.

    Raises:
        OSError: if a disk failed; all ranks raise it.
        Damaged: if bytes could not be read, or arrive as others.
    """
    problems: list[Exception] = []
    # All ranks follow one order, so the first pair that is not done can always proceed.
    for each in transfers:
        try:
            if each.source == world.rank:
                send(folder, each, world.slow_group)
            if each.target == world.rank:
                receive(folder, each, world.slow_group, take)
        except (OSError, Damaged) as error:
            problems.append(error)

    def settle() -> None:
        for problem in problems:
            raise problem

    on_all_ranks(world, settle)


def messages(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Divide spans into messages, none of more than `CHUNK` bytes."""
    message: list[Span] = []
    for name, begin, size in spans:
        for at in range(0, size, CHUNK):
            part = Span(name, begin + at, min(CHUNK, size - at))
            if sum(each.size for each in message) + part.size > CHUNK:
                yield message
                message = []
            message.append(part)
    if message:
        yield message


def send(folder: Path, transfer: Transfer, group: "dist.ProcessGroup") -> None:
    """Send spans and their hash; all messages are sent even if a disk fails, as they are awaited.

    Raises:
        OSError: if the disk failed; the hash sent is then wrong.
    """
    state, problem = xxhash.xxh3_128(), None
    for message in messages(transfer.spans):
        data = bytearray(sum(span.size for span in message))
        try:
            if problem is None:
                _read_into(memoryview(data), folder, message)
        except OSError as error:
            problem = error
        state.update(data)
        dist.send(torch.frombuffer(data, dtype=torch.uint8), transfer.target, group)
    proof = bytearray(len(state.digest())) if problem else bytearray(state.digest())
    dist.send(torch.frombuffer(proof, dtype=torch.uint8), transfer.target, group)
    if problem:
        raise problem


def _read_into(data: memoryview, folder: Path, spans: Sequence[Span]) -> None:
    for span in spans:
        with (folder / span.name).open("rb") as file:
            file.seek(span.begin)
            if file.readinto(data[: span.size]) != span.size:
                raise OSError(f"{folder / span.name}: it ends early")
        data = data[span.size :]


def receive(
    folder: Path,
    transfer: Transfer,
    group: "dist.ProcessGroup",
    take: Callable[[memoryview], object],
) -> None:
    """Receive what `send` sends, all of it even if `take` fails.

    Raises:
        OSError: as `take` does.
        Damaged: if it is not what was read.
    """
    state, problem = xxhash.xxh3_128(), None
    for message in messages(transfer.spans):
        part = torch.empty(sum(span.size for span in message), dtype=torch.uint8)
        dist.recv(part, transfer.source, group)
        data = memoryview(part.numpy())  # type: ignore[arg-type]
        state.update(data)
        try:
            if problem is None:
                take(data)
        except OSError as error:
            problem = error
    proof = torch.empty(len(state.digest()), dtype=torch.uint8)
    dist.recv(proof, transfer.source, group)
    if problem:
        raise problem
    if proof.numpy().tobytes() != state.digest():
        raise Damaged(f"{folder}: rank {transfer.source} could not send its files")
