"""Facts that `check` finds only when asked: planned memory, and the start of a run."""

from collections.abc import Callable
from typing import cast

from torchtitan import config
from torchtitan.checkpoint import saved_steps
from torchtitan.config import ConfigError, Problem, RecipeError
from torchtitan.device import DeviceType, pick
from torchtitan.estimate.changes import Load
from torchtitan.estimate.fitting import in_words, peak_of, remedy, room
from torchtitan.estimate.hardware import find_hardware
from torchtitan.estimate.plan import Plan, plan
from torchtitan.job import JobConfig
from torchtitan.parts import resume_policy
from torchtitan.tools.options import progress

__all__ = ["Plan", "beginning", "memory", "peak_of", "plan_or_reason", "refusal", "room"]


def plan_or_reason(
    job: JobConfig,
    ranks: int,
    device_type: str | None,
    capacity_gib: float | None,
    count: Callable[[int], None],
) -> Plan | str:
    """Plan a recipe for the hardware that it states, or for another type of device.

    Returns the reason if it cannot be planned.
    """
    try:
        stated = job.job.hardware
        hardware = find_hardware(stated, "job.hardware") if stated else None
        if hardware and device_type not in (None, hardware.device_type):
            hardware = None
        return plan(
            job,
            ranks,
            hardware,
            device_type=cast(DeviceType, device_type or pick().type),
            capacity_gib=capacity_gib,
            count=count,
        )
    except RecipeError as error:
        return error.lines[0]


def refusal(planned: Plan | str, load: Load) -> str:
    """Return why a rank does not fit into its device by its plan; empty if it does."""
    if isinstance(planned, str) or planned.fits:
        return planned if isinstance(planned, str) else ""
    with progress("looking for changes after which it fits"):
        fix = remedy(planned, load)
    return f"a rank takes {peak_of(planned).device:.1f} GiB by its plan; {fix}"


def memory(planned: Plan | str) -> str:
    """Describe the memory of the fullest rank."""
    if isinstance(planned, str):
        return f"planned memory: unknown, as {planned}"
    of, device = "of the fullest rank" if len(planned.kinds) > 1 else "of a rank", planned.hardware
    room, capacity, fits = planned.room_gib, planned.capacity_gib, ""
    if room is not None:
        fits = f"; {room:.1f} of {capacity:.1f} remain"
        if room < 0:
            fits = f"; it does not fit: {-room:.1f} too much for {capacity:.1f}"
    kinds = f" ({large})" if (large := in_words(planned.by_kind_gib)) else ""
    outside = f", {planned.outside_gib:.1f} outside the allocator" if planned.outside_gib else ""
    return (
        f"planned memory {of} on {device.name if device else planned.device_type}: "
        f"{planned.allocated_gib.value:.1f} GiB allocated, {planned.reserved_gib.value:.1f} "
        f"reserved{outside}{kinds}{fits}"
    )


def beginning(found: config.Recipe[JobConfig], here: bool) -> list[str]:
    """Describe the checkpoint a run starts from, if any; refuse one that does not fit.

    Checkpoints of the run itself count if it is to run `here`.
    """
    policy, checkpoint = resume_policy(found.config), found.config.checkpoint
    path, has_frequent = checkpoint.initial_load_path, here and checkpoint.frequent.interval
    not_looked_for = "frequent checkpoint, which is not looked for here"
    if (
        has_frequent
        and checkpoint.resume == "must"
        and not saved_steps(checkpoint.path_in(policy.dump_folder))
    ):
        return [f"is refused unless nodes hold a {not_looked_for}"]
    if here:
        start = policy.start()
    elif path is None:
        return []
    else:
        try:
            start = policy.initial()
        except ConfigError as error:
            found.refuse([Problem("checkpoint.initial_load_path", str(error))])
            raise
    also = [f"unless nodes hold a newer {not_looked_for}"] * bool(has_frequent)
    if start.path is None:
        return ["starts from scratch", *also]
    what = "starts from the weights in" if start.model_only else "resumes from"
    return [f"{what} {start.path}", *start.changes, *filter(None, [start.rate]), *also]
