"""Bytes of files that ranks send each other, in bounded messages over gloo.

Each message is awaited by its receiver, so all of them are sent and received even if a disk fails;
the hash at the end tells whether the bytes are those that were read.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash

from torchtitan.checkpoint.manifest import Damaged
from torchtitan.checkpoint.placement import on_all_ranks
from torchtitan.checkpoint.store import DISK
from torchtitan.parallel import World

CHUNK = 8 * 2**20
"""Maximum number of bytes in a message."""


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


class Delivery(NamedTuple):
    """Bytes that one rank reads in a folder and sends to another, one span after the other."""

    source: int
    target: int
    spans: tuple[Span, ...]


def deliver(
    world: World, folder: Path, deliveries: Sequence[Delivery], take: Callable[[memoryview], object]
) -> None:
    """Carry out deliveries, of which every rank knows all; `take` is called with what arrives here.

    Raises:
        OSError: if a disk failed; all ranks raise it.
        Damaged: if bytes could not be read, or arrive as others.
    """
    problems: list[Exception] = []
    # All ranks follow one order, so the first pair that is not done can always proceed.
    for each in deliveries:
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


def send(folder: Path, delivery: Delivery, group: "dist.ProcessGroup") -> None:
    """Send spans and their hash; all messages are sent even if a disk fails, as they are awaited.

    Raises:
        OSError: if the disk failed; the hash sent is then wrong.
    """
    state, problem = xxhash.xxh3_128(), None
    for message in messages(delivery.spans):
        data = bytearray(sum(span.size for span in message))
        try:
            if problem is None:
                _read_into(memoryview(data), folder, message)
        except OSError as error:
            problem = error
        state.update(data)
        dist.send(torch.frombuffer(data, dtype=torch.uint8), delivery.target, group)
    proof = bytearray(len(state.digest())) if problem else bytearray(state.digest())
    dist.send(torch.frombuffer(proof, dtype=torch.uint8), delivery.target, group)
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
    delivery: Delivery,
    group: "dist.ProcessGroup",
    take: Callable[[memoryview], object],
) -> None:
    """Receive what `send` sends, all of it even if `take` fails.

    Raises:
        OSError: as `take` does.
        Damaged: if it is not what was read.
    """
    state, problem = xxhash.xxh3_128(), None
    for message in messages(delivery.spans):
        part = torch.empty(sum(span.size for span in message), dtype=torch.uint8)
        dist.recv(part, delivery.source, group)
        data = memoryview(part.numpy())  # type: ignore[arg-type]
        state.update(data)
        try:
            if problem is None:
                take(data)
        except OSError as error:
            problem = error
    proof = torch.empty(len(state.digest()), dtype=torch.uint8)
    dist.recv(proof, delivery.source, group)
    if problem:
        raise problem
    if proof.numpy().tobytes() != state.digest():
        raise Damaged(f"{folder}: rank {delivery.source} could not send its files")
