"""Notes of a rank after its first two steps: the time to start, the bytes that its optimizer keeps,
and the bytes that it sends.

The first step of a process compiles, makes communicators and fills caches, so that its time is part
of the start. The second is one like all that follow: its collectives, which torch's Flight Recorder
remembers, are what a step sends.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from torchtitan.flight_recorder import recorded, sent_by_kind
from torchtitan.metrics import EventLog
from torchtitan.parallel import World
from torchtitan.timeline import Timeline, age_of_process
from torchtitan.torch_private.compiler import compile_seconds

NEIGHBORS = "neighbors"
"""Name in reports of ranks that are a part of an axis."""


class Startup:
    """Watches the first two steps of this process."""

    def __init__(
        self,
        events: EventLog,
        timeline: Timeline,
        world: World,
        state_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`state_bytes` returns the bytes of this rank's optimizer states after its first step."""
        self.state_bytes = state_bytes
        self.events, self.timeline, self.world = events, timeline, world
        self.remembered = world.comm.trace_buf_size
        self.steps = 0
        self.began, self.age = time.time(), age_of_process()
        # The process may have compiled for an earlier run.
        self.compiled = compile_seconds()

    def before_step(self) -> None:
        """Note the time; called before each step."""
        if self.steps < 2:
            self.began = time.time()
        if self.steps == 0:
            self.age = age_of_process()

    def after_step(self, step: int) -> None:
        """Report the first two steps; called after each step."""
        self.steps += 1
        if self.steps == 1:
            self.events.write(step, "start", **self._start())
        elif self.steps == 2 and self.remembered:
            with self.timeline.pause("report"):
                sent = self._sent()
            self.events.write(step, "traffic", **sent)

    def _start(self) -> dict[str, float | None]:
        first = time.time() - self.began
        return {
            "before_first_step_s": self.age,
            "first_step_s": first,
            "compile_s": compile_seconds() - self.compiled,
            "state_bytes": self.state_bytes(),
        }

    def _sent(self) -> dict[str, Any]:
        found = recorded(self.world.device.type) if self.world.size > 1 else []
        if len(found) >= self.remembered and found[0].created >= self.began:
            return {
                "left_out": "a step has more collectives than comm.trace_buf_size = "
                f"{self.remembered} keeps; increase it to have them counted"
            }
        of_step = [one for one in found if one.created >= self.began]
        used = [axis for axis, size in self.world.degrees._asdict().items() if size > 1]
        # An axis over all ranks shares their group with what is for all of them.
        names = {"all": used[0]} if len(used) == 1 else {}
        # Of meshes that FSDP2 makes for itself, torch says no more.
        names["dim_1"] = NEIGHBORS
        kinds: list[dict[str, Any]] = [
            {
                "axis": names.get(group, group),
                "operation": name,
                "count": count,
                "bytes": round(size),
            }
            for (group, name), (count, size) in sent_by_kind(of_step).items()
        ]
        sent: Counter[str] = Counter()
        for kind in kinds:
            sent[f"sent/{kind['axis']}"] += kind["bytes"]
        # Gloo records none.
        return {**sent, "messages": sum(one.is_p2p for one in of_step), "collectives": kinds}
