"""Whether what a run holds at the least fits in the memory of this machine, or of any."""

from collections.abc import Callable, Iterator

from torchtitan.checks.model import model_of
from torchtitan.checks.pipelining import pipeline
from torchtitan.config import PlannedWorld, Problem
from torchtitan.device import GIB, Device, pick
from torchtitan.estimate.memory import Memory, Plan
from torchtitan.job import JobConfig

ANY_MACHINE = 64 * 1024
"""GiB; more than one process has on any machine."""
SMALLER = (
    "a smaller batch or sequence, activation_checkpoint, more shards, training.dtype, "
    "optimizer.state_dtype or training.enable_cpu_offload make it less"
)


def of_rank(job: JobConfig, ranks: int) -> Plan | None:
    """What decides on the memory of a rank; None if there is no such model or layout."""
    if model_of(job) is None or min(job.degrees(ranks)) < 1:
        return None
    return Plan(job.layout(), job.work(ranks), job.optimizer, has_states=job.training.steps > 1)


def fits(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """There is room for the ranks of this machine, whatever else it does."""
    ranks = world.ranks or job.parallelism.least_ranks
    needs = of_rank(job, ranks)
    if needs is None:
        return
    # Without making the network: it has as many blocks at the least.
    of_samples = needs.of_samples([*map(str, range(needs.work.args.n_layers))])
    if of_samples.total > ANY_MACHINE * GIB:
        yield Problem(
            "training.seq_len",
            f"with training.local_batch_size {job.training.local_batch_size:,} the samples of a "
            f"rank take {of_samples}; no machine has so much",
            ("training.local_batch_size", "model"),
        )
        return
    if not world.local_ranks or world.device_type != pick().type:
        return
    at_least, local = needs.least(), min(world.local_ranks, ranks)
    # Stages that cannot be are refused by another rule.
    estimated = at_least if any(pipeline(job, world)) else needs.estimate()
    for place, count, part in places(Device(pick().type), local):
        least, about = (count * part(held) / GIB for held in (at_least, estimated))
        whose = f"{count} ranks hold" if count > 1 else "a rank holds"
        where = "the host" if place.type == "cpu" else place.name
        if least > (limit := place.memory_limit()):
            message = (
                f"{whose} {least:,.1f} GiB at the least, and {where} has {limit:,.1f}; each: "
                f"{at_least}; {SMALLER}"
            )
            yield Problem(key(at_least), message)
        elif about > (free := place.memory_available()):
            message = (
                f"{whose} about {about:,.1f} GiB by an estimate, and {free:,.1f} of {where} are "
                f"free; each: {estimated}; {SMALLER}"
            )
            yield Problem(key(estimated), message, (), "note")


def places(device: Device, local: int) -> list[tuple[Device, int, Callable[[Memory], float]]]:
    """Each memory of this machine, how many ranks share it, and what of a rank is in it."""
    if device.type == "cpu":
        return [(device, local, lambda held: held.total)]
    return [
        (device, 1, lambda held: held.total - held.on_host),
        (Device("cpu"), local, lambda held: held.on_host),
    ]


def key(held: Memory) -> str:
    """What of the recipe makes it most."""
    of_samples = held.activations + held.logits
    return "training.local_batch_size" if 2 * of_samples > held.total else "model.flavor"
