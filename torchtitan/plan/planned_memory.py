"""The planned memory of a rank, as `check --plan` shows and judges it."""

from collections.abc import Callable, Iterator
from typing import cast

from torchtitan.config import Problem, RecipeError
from torchtitan.device import DeviceType, pick
from torchtitan.job import JobConfig
from torchtitan.plan.changes import Load
from torchtitan.plan.fitting import in_words, peak_of, remedy, room
from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.plan import Plan, plan
from torchtitan.tools.options import progress


class PlannedMemory:
    """Planned memory of the fullest rank of a recipe, or the reason why there is no plan."""

    def __init__(
        self,
        job: JobConfig,
        ranks: int,
        device_type: str | None,
        capacity_gib: float | None,
        count: Callable[[int], None],
    ) -> None:
        """Plan a recipe for the hardware that it states, or for another type of device."""
        self.ranks, self.reason = ranks, ""
        self.plan: Plan | None = None
        try:
            stated = job.job.hardware
            hardware = find_hardware(stated, "job.hardware") if stated else None
            if hardware and device_type not in (None, hardware.device_type):
                hardware = None
            self.plan = plan(
                job,
                ranks,
                hardware,
                device_type=cast(DeviceType, device_type or pick().type),
                capacity_gib=capacity_gib,
                count=count,
            )
        except RecipeError as error:
            self.reason = error.lines[0]

    def refusal(self, load: Load) -> str:
        """Return why a rank does not fit into its device by its plan; empty if it does."""
        if self.plan is None or self.plan.fits:
            return self.reason
        with progress("looking for changes after which it fits"):
            fix = remedy(self.plan, load)
        return f"a rank takes {peak_of(self.plan).device:.1f} GiB by its plan; {fix}"

    def notes(self) -> Iterator[Problem]:
        """Note when the ranks may not fit in the free memory of this host."""
        if self.plan is not None:
            yield from room(self.ranks, peak_of(self.plan))

    def summary(self) -> str:
        """Describe the memory of the fullest rank."""
        if self.plan is None:
            return f"planned memory: unknown, as {self.reason}"
        return memory(self.plan)


def memory(planned: Plan) -> str:
    """Describe the memory of the fullest rank."""
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
