"""Check that a lower bound on the memory of the samples fits in any machine."""

from collections.abc import Iterator

from torchtitan.checks.memory_bounds import MemoryBounds
from torchtitan.checks.model import model_of
from torchtitan.config import PlannedWorld, Problem
from torchtitan.device import GIB
from torchtitan.job import JobConfig

ANY_MACHINE = 64 * 1024
"""GiB; more than a process has on any machine."""


def of_rank(job: JobConfig, ranks: int) -> MemoryBounds | None:
    """Return the bounds of the memory of a rank; None if there is no such model or layout."""
    if model_of(job) is None or min(job.degrees(ranks)) < 1:
        return None
    layout, has_states = job.layout(job.degrees(ranks)), job.training.steps > 1
    return MemoryBounds(layout, job.work(ranks), job.optimizer, has_states=has_states)


def samples(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check the samples of a rank; whether all of it fits in a machine is left to `estimate`."""
    bounds = of_rank(job, world.ranks or job.parallelism.least_ranks)
    if bounds is None:
        return
    # Without building the network: it has at least as many blocks.
    held = bounds.of_samples([*map(str, range(bounds.work.args.n_layers))]).total / GIB
    if held > ANY_MACHINE:
        yield Problem(
            "training.seq_len",
            f"with training.local_batch_size {bounds.work.local_batch_size:,} the samples of "
            f"a rank take {held:,.0f} GiB; no machine has that much memory",
            ("training.local_batch_size", "model"),
        )
