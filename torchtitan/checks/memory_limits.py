"""Checks that a lower bound on the memory of a run fits in this machine, or in any."""

from collections.abc import Iterator
from typing import NamedTuple

from torchtitan.checks.model import model_of
from torchtitan.config import PlannedWorld, Problem
from torchtitan.device import GIB, Device, pick, smallest
from torchtitan.estimate.memory import Memory, MemoryInputs
from torchtitan.job import JobConfig

ANY_MACHINE = 64 * 1024
"""GiB; more than a process has on any machine."""
SMALLER = (
    "reduce it by a smaller batch or sequence, activation_checkpoint, more shards, "
    "training.dtype, optimizer.state_dtype or training.enable_cpu_offload"
)


def of_rank(job: JobConfig, ranks: int) -> MemoryInputs | None:
    """Return the memory plan of a rank; None if there is no such model or layout."""
    if model_of(job) is None or min(job.degrees(ranks)) < 1:
        return None
    layout, has_states = job.layout(job.degrees(ranks)), job.training.steps > 1
    return MemoryInputs(layout, job.work(ranks), job.optimizer, has_states=has_states)


def fits(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the ranks of this machine fit in its memory, even if it were all free."""
    ranks = world.ranks or job.parallelism.least_ranks
    needs = of_rank(job, ranks)
    if needs is None:
        return
    # Lower bound without building the network: it has at least as many blocks.
    of_samples = needs.of_samples([*map(str, range(needs.work.args.n_layers))])
    if of_samples.total > ANY_MACHINE * GIB:
        yield Problem(
            "training.seq_len",
            f"with training.local_batch_size {needs.work.local_batch_size:,} the samples of "
            f"a rank take {of_samples}; no machine has that much memory",
            ("training.local_batch_size", "model"),
        )
        return
    if not world.local_ranks or world.device_type != pick().type:
        return
    at_least, local = needs.least(), min(world.local_ranks, ranks)
    for place in places(smallest(local), local, at_least):
        if place.holds > (limit := place.device.memory_limit()):
            message = (
                f"{place.subject} at least {place.holds:,.1f} GiB, and {place} has "
                f"{limit:,.1f}; each: {at_least}; {SMALLER}"
            )
            yield Problem(key(at_least), message)


def room(job: JobConfig, ranks: int, local_ranks: int, device: Device) -> Iterator[Problem]:
    """Note when the ranks of this machine may not fit in the free memory.

    Args:
        device: device of this process, since querying its free memory allocates some of it.
    """
    if needs := of_rank(job, ranks):
        estimated = needs.estimate()
        for place in places(device, min(local_ranks, ranks), estimated):
            if place.holds > (free := place.device.memory_available()):
                message = (
                    f"{place.subject} about {place.holds:,.1f} GiB by an estimate, and {free:,.1f} "
                    f"of {place} are free; each: {estimated}; {SMALLER}"
                )
                yield Problem(key(estimated), message, (), "note")


class MemoryPool(NamedTuple):
    """Memory pool of this machine, and the ranks that share it."""

    device: Device
    ranks: int
    holds: float
    """GiB of all its ranks."""

    @property
    def subject(self) -> str:
        """Subject of a sentence on `holds`."""
        return f"{self.ranks} ranks hold" if self.ranks > 1 else "a rank holds"

    def __str__(self) -> str:
        return "the host" if self.device.type == "cpu" else self.device.name


def places(device: Device, local: int, of_rank: Memory) -> list[MemoryPool]:
    """Return each memory pool used by ranks on devices such as `device`."""
    if device.type == "cpu":
        return [MemoryPool(device, local, local * of_rank.total / GIB)]
    return [
        MemoryPool(device, 1, of_rank.on_device / GIB),
        MemoryPool(Device("cpu"), local, local * of_rank.on_host / GIB),
    ]


def key(held: Memory) -> str:
    """Return the setting that dominates the estimate."""
    of_samples = held.activations + held.logits
    return "training.local_batch_size" if 2 * of_samples > held.total else "model.flavor"
