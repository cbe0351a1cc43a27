"""Measurements of one rank: its device, its links to the other ranks, and the folder of the run."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.device import Device
from torchtitan.parallel import World

SIDE = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the matrices to multiply."""
SECONDS = {"cpu": 0.5, "cuda": 3.0}
"""Time to repeat their product."""
COPIED = {"cpu": 2**26, "cuda": 2**30}
"""Bytes of a copy in memory."""
SENT = {"cpu": 2**22, "cuda": 2**28}
"""Bytes sent between two ranks, and summed over several."""
WRITTEN = {"cpu": 2**24, "cuda": 2**28}
"""Bytes that each node writes into the folder of the run."""
TIMES = 3
"""Repetitions of a copy, a message or a sum, of which the fastest counts."""
SEEN_SECONDS = 10.0
"""Time in which a change of one node must be seen by the others; NFS caches names for seconds."""
Rates = dict[str, float]


class Broken(Exception):
    """Something that does not work on this rank."""


def products(device: Device) -> Rates:
    """Multiply matrices, in bfloat16 on CUDA and in float32 on a CPU: TFLOP/s.

    They hold -1, 0 and 1, such that the sums are exact, and the product of the result and a vector
    (Freivalds' algorithm) tells whether it is right.
    """
    side, like = SIDE[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator, dtype=torch.int8)

    few = draw(side, side) * (draw(side, side) == 0)
    a, b, v = (x.to(device.torch_device) for x in (few, draw(side, side), draw(side, 1)))
    left, right = a.to(like), b.to(like)
    out, taken, began = left @ right, list[float](), time.perf_counter()
    while not taken or time.perf_counter() - began < SECONDS[device.type]:
        taken.append(_seconds(lambda: torch.mm(left, right, out=out), device))
    if not torch.equal(out.double() @ v.double(), a.double() @ (b.double() @ v.double())):
        raise Broken("the product of two matrices is wrong")
    return {"products": 2 * side**3 / median(taken) / 1e12}


def memory(device: Device) -> Rates:
    """Copy within memory: GB/s, reads and writes; and the GiB that are free."""
    x = torch.arange(COPIED[device.type] // 4, dtype=torch.int32, device=device.torch_device)
    out = torch.empty_like(x)
    seconds = min(_seconds(lambda: out.copy_(x), device) for _ in range(TIMES))
    if not torch.equal(x, out):
        raise Broken("a copy in memory differs from its source")
    return {"memory": 2 * x.nbytes / seconds / 1e9, "free memory": device.memory_available()}


def host_link(device: Device) -> Rates:
    """Copy from and to pinned memory of the host: GB/s."""
    if device.type == "cpu":
        return {}
    host = torch.arange(SENT["cuda"] // 4, dtype=torch.int32).pin_memory()
    here, back = torch.empty_like(host, device=device.torch_device), torch.empty_like(host)
    back = back.pin_memory()
    to = min(_seconds(lambda: here.copy_(host, True), device) for _ in range(TIMES))
    of = min(_seconds(lambda: back.copy_(here, True), device) for _ in range(TIMES))
    if not torch.equal(host, back):
        raise Broken("a copy to the device and back differs from its source")
    return {"to device": host.nbytes / to / 1e9, "from device": host.nbytes / of / 1e9}


def pairs(world: World, nodes: list[int]) -> Rates:
    """Exchange tensors with the ranks whose numbers differ in one bit: GB/s in each direction.

    All pairs of a bit exchange at the same time. The fastest pair inside a node counts, and the
    fastest between nodes, so that a slow rank is not held against its partners.
    """
    device, found = world.device, Rates()
    mine = torch.full((SENT[device.type] // 4,), world.rank, dtype=torch.int32)
    mine = mine.to(device.torch_device)
    theirs = torch.empty_like(mine)
    for bit in range((world.size - 1).bit_length()):
        world.gather(None)  # all begin at the same time
        if (other := world.rank ^ 1 << bit) >= world.size:
            continue

        def exchange(other: int = other) -> None:
            operations = [
                dist.P2POp(dist.isend, mine, other),
                dist.P2POp(dist.irecv, theirs, other),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        exchange()
        seconds = min(_seconds(exchange, device) for _ in range(TIMES))
        if not bool((theirs == other).all()):
            raise Broken(f"what rank {other} sent is not what arrived")
        inside = nodes[other] == nodes[world.rank]
        name = "pairs inside a node" if inside else "pairs between nodes"
        found[name] = max(found.get(name, 0.0), mine.nbytes / seconds / 1e9)
    return found


def sums(world: World, nodes: list[int]) -> Rates:
    """Sum a tensor over the ranks of this node, and over all: GB/s of the bus.

    The bus rate does not depend on the number of ranks n: 2 (n - 1) / n x bytes / seconds
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    if world.size == 1:
        return {}
    found, own = Rates(), nodes[world.rank]
    local = [rank for rank, node in enumerate(nodes) if node == own]
    if 1 < len(local) < world.size:
        group = dist.new_group(local, use_local_synchronization=True)
        found["sum in a node"] = _sum_rate(world, group, len(local))
    found["sum"] = _sum_rate(world, dist.group.WORLD, world.size)
    return found


def _sum_rate(world: World, group: "dist.ProcessGroup | None", ranks: int) -> float:
    device = world.device
    x = torch.ones(SENT[device.type] // 4, dtype=torch.int32, device=device.torch_device)
    dist.all_reduce(x, group=group)
    if not bool((x == ranks).all()):
        raise Broken(f"the sum over {ranks} ranks is wrong")
    seconds = min(_seconds(lambda: dist.all_reduce(x, group=group), device) for _ in range(TIMES))
    return 2 * (ranks - 1) / ranks * x.nbytes / seconds / 1e9


def clocks(world: World) -> list[float]:
    """Return the time of each rank's clock minus the median, in seconds; taken when all meet."""
    found: list[list[float]] = []
    for _ in range(TIMES):
        world.gather(None)
        times = world.gather(time.time())
        found.append([at - median(times) for at in times])
    return min(found, key=lambda offsets: max(map(abs, offsets)))


def shared_folder(world: World, folder: Path, is_first: bool) -> Iterator[Callable[[], Rates]]:
    """Yield stages of a check of the folder, between which all ranks meet.

    Rank 0 makes a folder in it, locks a file and renames a folder; the first rank of each node
    must see that, and writes and reads a file of its own.

    Args:
        is_first: whether this is the first rank of its node.
    """
    name = world.broadcast_object(f".preflight-{uuid4().hex[:8]}")
    probe, moved, made = folder / name, folder / name / "moved", list[Path]()
    is_owner, held = world.rank == 0, list[int]()

    def make() -> Rates:
        if is_owner:
            made.extend(path for path in (folder, *folder.parents) if not path.exists())
            (probe / "made").mkdir(parents=True)
            held.append(os.open(probe / "lock", os.O_CREAT | os.O_RDWR))
            fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return {}

    def see() -> Rates:
        if is_first and not _becomes(lambda: (probe / "lock").exists()):
            raise Broken(f"{folder} is not the folder that rank 0 sees; use one that all share")
        return {}

    def lock() -> Rates:
        if is_first and not is_owner:
            other = os.open(probe / "lock", os.O_RDWR)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return {}
            finally:
                os.close(other)
            raise Broken(f"a lock of rank 0 in {folder} does not hold here: mount it with locks")
        return {}

    def rename() -> Rates:
        if is_owner:
            (probe / "made").rename(moved)
        return {}

    def see_renamed() -> Rates:
        if is_first and not _becomes(lambda: moved.exists() and not (probe / "made").exists()):
            raise Broken(f"a folder that rank 0 renamed in {folder} has its old name here")
        return {}

    def write() -> Rates:
        return _written(moved / str(world.rank), world.device) if is_first else {}

    def remove() -> Rates:
        if is_owner:
            for path in sorted(probe.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            for path in (probe, *made):
                path.rmdir()
        return {}

    yield from (make, see, lock, rename, see_renamed, write, remove)


def _written(path: Path, device: Device) -> Rates:
    """Write a file, flush it to disk, and read it back: MB/s."""
    size = WRITTEN[device.type]
    content, found = os.urandom(size), list[bytes]()
    with path.open("wb") as file:

        def write() -> None:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

        written = _seconds(write, device)
        if hasattr(os, "posix_fadvise"):  # from the disk and not the page cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read = _seconds(lambda: found.append(path.read_bytes()), device)
    if found[0] != content:
        raise Broken(f"{path.parent.parent.parent}: what was read back is not what was written")
    return {"writing": size / written / 1e6, "reading": size / read / 1e6}


def _becomes(condition: Callable[[], bool]) -> bool:
    """Whether a condition is met in time."""
    until = time.monotonic() + SEEN_SECONDS
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _seconds(act: Callable[[], object], device: Device) -> float:
    """Return the time of `act`, with what it queued on the device."""
    device.synchronize()
    begin = time.perf_counter()
    act()
    device.synchronize()
    return time.perf_counter() - begin
