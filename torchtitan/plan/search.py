"""Search of the valid layouts of a recipe for the fastest that fits on given hardware.

All layouts are enumerated, and `LayoutCosts` says about how long each takes and how much memory.
The layout of the recipe is planned first, then the others in the order of these costs, two at a
time, and only plans are reported. A layout with the same kernels as a planned one is expected to
exceed its costs as much. The search ends when no other layout is expected to be among the fastest
plans, or its time is up, but never before `LEAST` plans. So the best is never slower than the
layout of the recipe, if that fits. Which layout comes next depends on earlier plans, not on time.
"""

import gc
import itertools
import math
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torchtitan.checks import ELSEWHERE, is_error_of, problems
from torchtitan.config import PlannedWorld
from torchtitan.job import JobConfig
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.layouts import (
    CP,
    EP,
    MODE,
    OPTION,
    PP,
    RESHARD,
    TP,
    Changes,
    Cost,
    LayoutCosts,
    layouts,
    own_layout,
    sequences,
    with_changes,
)
from torchtitan.plan.plan import Plan, Range, plan
from torchtitan.provenance import to_toml

PROCESSES = 2
"""Layouts that are planned at the same time."""
TOP = 5
"""Number of layouts that fit to find, of which none is expected to be slower than one left out."""
LEAST = 10
"""Number of layouts that are planned whatever the time, if there are as many."""
ALL = 64
"""Number of layouts up to which every one is planned, if there is time."""
FAR = 1.3
"""Memory relative to the room of a device from which a layout is not planned."""


class PlannedLayout(NamedTuple):
    """Layout of a recipe with the numbers of its plan."""

    changes: Changes
    fits: bool
    reserved_gib: Range
    tokens_per_second_per_device: float
    seconds_per_step: float
    mfu: float | None
    parts: Mapping[str, float]
    """Seconds of a step by cause."""


@dataclass
class SearchResult:
    """Layouts that were planned, the best that fits first."""

    layouts: list[PlannedLayout] = field(default_factory=list)
    too_large: list[PlannedLayout] = field(default_factory=list)
    """Planned layouts that do not fit."""
    enumerated: int = 0
    refused: int = 0
    """Layouts that the checks of recipes refuse."""
    without_room: int = 0
    """Layouts that do not fit by far, by their approximate memory."""
    failed: dict[str, int] = field(default_factory=dict)
    """Layouts whose plan failed, by the reason."""
    is_complete: bool = False
    """Whether no other layout is expected to be among the fastest."""
    seconds: float = 0.0

    @property
    def planned(self) -> int:
        """Number of layouts with a plan."""
        return len(self.layouts) + len(self.too_large)

    @property
    def best(self) -> str:
        """Description of the first layout."""
        return f"the best of {self.planned:,} planned of {self.enumerated:,} layouts"


def _kernels(layout: Changes) -> tuple[Any, ...]:
    """Return settings that determine the kernels of a block."""
    keys = (TP, CP, RESHARD, MODE)
    more = layout.get(OPTION), layout.get(EP), layout[PP] > 1
    return (sequences(layout), *more, *(layout[key] for key in keys))


class LayoutQueue:
    """Layouts without a plan, the one that is expected to be the fastest first."""

    def __init__(self, costs: Sequence[Cost]) -> None:
        self._alike: dict[tuple[Any, ...], list[Cost]] = {}
        # Among equals the simplest is the last of its list, which is taken first.
        for cost in sorted(costs, key=_order, reverse=True):
            self._alike.setdefault(_kernels(cost.layout), []).append(cost)
        self._too_large: list[Cost] = []
        self._excess: dict[tuple[Any, ...], tuple[float, float]] = {}
        """Ratios of planned and approximate time and memory, by kernels: the last ones."""

    def learn(self, cost: Cost, seconds: float, room: float) -> None:
        """Note the time and the memory of a plan."""
        self._excess[_kernels(cost.layout)] = seconds / cost.seconds, room / cost.room

    def pop(self, most: float) -> Cost | None:
        """Remove the first; None if it is expected to take longer than `most` seconds.

        Layouts that are expected not to fit come after all others, and only without such a limit.
        """
        usual = [median(each) for each in zip(*self._excess.values(), strict=True)] or [1.0, 1.0]
        expected: dict[tuple[Any, ...], float] = {}
        for kernels, alike in self._alike.items():
            time_ratio, room_ratio = self._excess.get(kernels, usual)
            while alike and alike[-1].room * room_ratio > 1:
                self._too_large.append(alike.pop())
            if alike:
                expected[kernels] = alike[-1].seconds * time_ratio
        if not expected:
            self._too_large.sort(key=lambda cost: cost.room, reverse=True)
            return self._too_large.pop() if self._too_large and most == math.inf else None
        first = min(expected, key=lambda kernels: expected[kernels])
        return self._alike[first].pop() if expected[first] < most else None


def _order(cost: Cost) -> tuple[float, int, int]:
    return cost.seconds, cost.layout[PP], cost.layout[TP]


def search(
    job: JobConfig, planned: Plan, hardware: Hardware, *, device_type: str, seconds: float
) -> SearchResult:
    """Search the layouts of a valid recipe.

    Args:
        planned: plan of the recipe on `hardware`.
        seconds: time after which no plan is begun or awaited, once there are `LEAST` plans.
    """
    start, found, ranks = time.monotonic(), SearchResult(), planned.ranks
    costs, own = LayoutCosts(job, ranks, hardware), own_layout(job, ranks)
    queue, plans_all = _queue(costs, own, found)
    fork = multiprocessing.get_context("fork")
    running = deque[tuple[Connection, Cost, Any, Path]]()

    def take(cost: Cost, answer: PlannedLayout) -> None:
        (found.layouts if answer.fits else found.too_large).append(answer)
        found.layouts.sort(key=lambda each: (each.seconds_per_step, each.reserved_gib.value))
        room = answer.reserved_gib.value / costs.room(cost.layout)
        queue.learn(cost, answer.seconds_per_step, room)

    def left(plans: int) -> float | None:
        """Return the seconds that are left, given the number of plans; None: no limit yet."""
        return None if plans < LEAST else max(seconds - (time.monotonic() - start), 0.0)

    def next_cost() -> Cost | None:
        plans = found.planned + len(running)
        enough = len(found.layouts) >= TOP and plans >= LEAST and not plans_all
        return queue.pop(found.layouts[TOP - 1].seconds_per_step if enough else math.inf)

    def begin(folder: Path) -> bool:
        """Plan the next layout that is valid and may fit, in another process."""
        while left(found.planned + len(running)) != 0 and (cost := next_cost()):
            changed = with_changes(job, cost.layout)
            if _is_refused(changed, ranks, device_type):
                found.refused += 1
                continue
            ours, theirs = fork.Pipe(False)
            errors = folder / f"{time.monotonic_ns()}"
            words = (theirs, errors, changed, cost.layout, ranks, hardware)
            process = fork.Process(target=_plan_one, args=words, daemon=True)
            process.start()
            theirs.close()
            running.append((ours, cost, process, errors))
            return True
        return False

    take(costs.cost(own), planned_layout(own, planned))
    with tempfile.TemporaryDirectory() as folder:
        while True:
            while len(running) < PROCESSES and begin(Path(folder)):
                pass
            # Answers are taken in the order of their beginning, so that speed does not matter.
            if not running or not running[0][0].poll(left(found.planned)):
                break
            ready, cost, process, errors = running.popleft()
            answer = _answer(ready, errors)
            process.join()
            if isinstance(answer, str):
                found.failed[answer] = found.failed.get(answer, 0) + 1
            else:
                take(cost, answer)
        found.is_complete = not running and next_cost() is None
        for _, _, process, _ in running:
            process.terminate()
            process.join()
    found.seconds = time.monotonic() - start
    return found


def _queue(costs: LayoutCosts, own: Changes, found: SearchResult) -> tuple[LayoutQueue, bool]:
    """Return the other layouts that may fit, and whether they are few; count them all."""
    may_fit = []
    for layout in layouts(costs.job, costs.ranks, costs.hardware.ranks_per_node):
        found.enumerated += 1
        cost = costs.cost(layout)
        if cost.room > FAR:
            found.without_room += 1
        elif layout != own:
            may_fit.append(cost)
    return LayoutQueue(may_fit), len(may_fit) <= ALL


def _is_refused(job: JobConfig, ranks: int, device_type: str) -> bool:
    """Whether the checks of recipes refuse a layout."""
    found = problems(job, PlannedWorld(ranks, device_type))
    return any(each.severity == "error" and not is_error_of(each, ELSEWHERE) for each in found)


def _plan_one(
    answer: Connection,
    errors: Path,
    job: JobConfig,
    layout: Changes,
    ranks: int,
    hardware: Hardware,
) -> None:
    """Send the numbers of a plan from a process of its own, whose messages are in a file."""
    gc.freeze()  # garbage of the parent may hold threads that a fork does not have
    with errors.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    answer.send(planned_layout(layout, plan(job, ranks, hardware)))


def planned_layout(layout: Changes, planned: Plan) -> PlannedLayout:
    """Return the numbers of a plan on known hardware."""
    step = planned.time
    assert step is not None, "the hardware is known"
    parts = {"computation": step.compute, "update": step.update, "bubble": step.bubble}
    parts |= {"host": step.host_bound}
    parts |= {f"communication ({axis})": each for axis, each in step.exposed.items()}
    return PlannedLayout(
        layout,
        bool(planned.fits),
        planned.reserved_gib,
        step.tokens_per_second_per_device,
        step.seconds,
        step.mfu,
        parts,
    )


def _answer(connection: Connection, errors: Path) -> PlannedLayout | str:
    """Receive the numbers of a plan, or the last line of its errors."""
    with connection:
        try:
            answer: PlannedLayout = connection.recv()
        except EOFError:
            lines = errors.read_text(encoding="utf-8", errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "it ended")
    return answer


REASONS = {
    "computation": "less computation",
    "update": "a shorter update",
    "bubble": "a smaller pipeline bubble",
    "host": "less waiting for the host",
}


def reason(fast: PlannedLayout, slow: PlannedLayout) -> str:
    """Explain in words why a layout is before the next."""
    gain = slow.seconds_per_step / fast.seconds_per_step - 1
    if gain < 0.002:
        return "as fast as the next"
    names = {*fast.parts, *slow.parts}
    saved = {name: slow.parts.get(name, 0.0) - fast.parts.get(name, 0.0) for name in names}
    most = max(sorted(saved), key=lambda name: saved[name])
    words = REASONS.get(most) or f"less exposed {most}"
    here, there = (each.parts.get(most, 0.0) / each.seconds_per_step for each in (fast, slow))
    shares = f"{here:.1%} of the step instead of {there:.1%}"
    return f"{gain:+.1%} over the next: {words} ({shares})"


def explained(layouts: Sequence[PlannedLayout]) -> list[str]:
    """Return the reason for the place of each layout; none for the last."""
    pairs = itertools.pairwise(layouts)
    return [*(reason(one, other) for one, other in pairs), ""][: len(layouts)]


def fastest(result: SearchResult, top: int = TOP) -> list[dict[str, Any]]:
    """Return the fastest layouts as JSON objects."""
    best = result.layouts[: top + 1]
    rows = zip(best, explained(best), strict=True)
    return [
        each._asdict() | {"reserved_gib": each.reserved_gib._asdict(), "reason": why}
        for each, why in rows
    ][:top]


def planned_recipe(job: JobConfig, given: JobConfig, extends: str, title: str = "") -> str:
    """Return a recipe, as TOML, that extends the file of the `given` one with all that differs.

    If an extension cannot express the difference, the recipe is whole: TOML has no `none`, and
    extends a list of sections only as a whole.

    Args:
        title: what the recipe is.
    """
    import tomlkit

    before, after = given.flat(), job.flat()
    changed = {k: value for k, value in after.items() if k not in before or before[k] != value}
    # Of a key that is gone, the extended file would set its value again.
    if before.keys() - after or any(
        value is None or key.count(".") > 1 for key, value in changed.items()
    ):
        text = to_toml(job)
    else:
        tree = dict[str, dict[str, Any]]()
        for key, value in changed.items():
            section, _, name = key.partition(".")
            tree.setdefault(section, {})[name] = value
        text = tomlkit.dumps({"extends": extends} | tree)
    return f"# {title or 'A layout'}, by `torchtitan plan --search`.\n{text}"
