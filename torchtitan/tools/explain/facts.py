"""What there is to be told of a run, as numbers: read from its folder, whatever it left there."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan.device import peak_flops
from torchtitan.timeline import PHASES
from torchtitan.tools.explain.state import State, state_of
from torchtitan.tools.explain.stragglers import Slowest, slowest_by_phase
from torchtitan.tools.explain.trace import read_trace
from torchtitan.tools.history import History, Row, seconds_of

AXES = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
}
# A trace may be of hundreds of megabytes.
MOST_TRACES = 8


@dataclass(frozen=True)
class Traces:
    """What the newest traces of a run say, of the ranks that were read."""

    folder: str
    steps: int
    compute_s: dict[int, float]
    """Seconds a step, by rank."""
    exposed: dict[int, float]
    """Share of the traced time, by rank."""
    idle: dict[int, float]
    left_out: int
    """Ranks whose trace was not read."""


@dataclass(frozen=True)
class Facts:
    """All of it; None, 0 or empty where the run left nothing about it."""

    folder: Path
    recipe: Mapping[str, Any]
    """By dotted keys."""
    ranks: int | None
    device: str | None
    on_cuda: bool
    layout: dict[str, int]
    step: int
    state: State
    tokens: int
    tokens_a_step: int | None
    tps: float | None
    """The median, as of all speeds."""
    mfu: float | None
    step_s: float | None
    phases: dict[str, float]
    """Seconds a step."""
    pauses: dict[str, float]
    """Seconds in all."""
    reported_s: float
    """What the phases and pauses are of, in all."""
    first_step_s: float | None
    before_first_step_s: float | None
    compile_s: float | None
    sent: dict[str, float]
    """Bytes of rank 0 in a step, by axis."""
    slowest: list[Slowest]
    memory_gib: float | None
    memory_pct: float | None
    skipped: int
    events: dict[str, int]
    """How often each kind of event happened."""
    traces: Traces | None

    @property
    def startup_s(self) -> float | None:
        """From the start of the process to the end of its first step."""
        if self.before_first_step_s is None or self.first_step_s is None:
            return self.first_step_s
        return self.before_first_step_s + self.first_step_s

    def share(self, phase: str) -> float:
        """Of the time of a step."""
        return self.phases.get(phase, 0.0) / (sum(self.phases.values()) or 1.0)

    def share_of_pause(self, name: str) -> float:
        """Of all the time that was reported."""
        return self.pauses.get(name, 0.0) / self.reported_s if self.reported_s else 0.0


def read_facts(folder: Path) -> Facts:
    """What a run left in its dump folder.

    Raises:
        ConfigError: where no run has written metrics.
    """
    history = History.open(folder)
    recipe, environment = history.recipe, history.environment
    ranks = environment.get("ranks")
    # An earlier launch may have had more.
    per_rank = {n: rows for n, rows in history.rank_events().items() if n < (ranks or n + 1)}
    starts = [[row for row in rows if row["event"] == "start"] for rows in per_rank.values()]
    last_starts = [of_rank[-1] for of_rank in starts if of_rank]
    rows = steady(history.rows, {row["step"] for of_rank in starts for row in of_rank})
    all_reports, reports = history.reports, [row for row, _ in rows]
    device = environment.get("device")
    seconds, pauses = _seconds(rows)
    steps = sum(count for _, count in rows)
    layout = _layout(recipe, ranks)
    return Facts(
        folder=folder,
        recipe=recipe,
        ranks=ranks,
        device=device,
        on_cuda=environment.get("device_type") == "cuda"
        or (device is not None and peak_flops(device) is not None),
        layout=layout,
        step=all_reports[-1]["step"] if all_reports else 0,
        state=state_of(folder, recipe),
        tokens=all_reports[-1]["tokens"] if all_reports else 0,
        tokens_a_step=_tokens_a_step(all_reports),
        tps=_median(row["tps"] for row in reports),
        mfu=_median(row.get("mfu") for row in reports),
        step_s=_median(row.get("step_time") for row in reports),
        phases={name: total / steps for name, total in seconds.items()},
        pauses=pauses,
        reported_s=sum(seconds.values()) + sum(pauses.values()),
        first_step_s=_largest(last_starts, "first_step_s"),
        before_first_step_s=_largest(last_starts, "before_first_step_s"),
        compile_s=_largest(last_starts, "compile_s"),
        sent=_sent(per_rank.get(0, [])),
        slowest=slowest_by_phase(per_rank, layout.get("pp", 1)),
        memory_gib=_largest(all_reports, "memory_gib"),
        memory_pct=_largest(all_reports, "memory_pct"),
        skipped=sum(row.get("skipped", 0) for row in all_reports),
        events=dict(Counter(row["event"] for row in history.rows if "event" in row)),
        traces=_traces(folder, recipe),
    )


def steady(rows: Sequence[Row], first_steps: Collection[int]) -> list[tuple[Row, int]]:
    """The reports but the first of each process, and the number of steps that each is of."""
    found: list[tuple[Row, int]] = []
    before: int | None = None
    for row in rows:
        if row.get("event") == "rollback":
            before = row["step"]
        elif "tps" in row:
            if before is not None and row["step"] > before and row["step"] not in first_steps:
                found.append((row, row["step"] - before))
            before = row["step"]
    return found


def _seconds(rows: Sequence[tuple[Row, int]]) -> tuple[dict[str, float], dict[str, float]]:
    """Of each phase, in order, and of each pause."""
    phases: dict[str, float] = {}
    pauses: dict[str, float] = {}
    for row, steps in rows:
        for sums, found in zip((phases, pauses), seconds_of(row, steps), strict=True):
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value
    return {name: phases[name] for name in PHASES if name in phases}, pauses


def _layout(recipe: Mapping[str, Any], ranks: int | None) -> dict[str, int]:
    """The size of each axis that has more than one rank."""
    sizes = {axis: int(recipe.get(key, 1)) for axis, key in AXES.items()}
    if sizes["dp_shard"] == -1:
        others = math.prod(size for axis, size in sizes.items() if axis != "dp_shard")
        sizes["dp_shard"] = (ranks or others) // others
    return {axis: size for axis, size in sizes.items() if size > 1}


def _tokens_a_step(reports: Sequence[Row]) -> int | None:
    found = [
        (after["tokens"] - before["tokens"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(reports)
        if after["step"] > before["step"]
    ]
    return round(statistics.median(found)) if found else None


def _sent(events: Sequence[Row]) -> dict[str, float]:
    rows = [row for row in events if row["event"] == "traffic"]
    found = rows[-1] if rows else {}
    return {k.removeprefix("sent/"): float(v) for k, v in found.items() if k.startswith("sent/")}


def _traces(folder: Path, recipe: Mapping[str, Any]) -> Traces | None:
    """Of the traces of the same steps that were written last."""
    parent = folder / str(recipe.get("profiling.save_traces_folder", "profile_traces"))
    paths = list(parent.glob("*/rank*_trace.json"))
    if not paths:
        return None
    newest = max(paths, key=lambda path: path.stat().st_mtime).parent
    return replace(read_rank_traces(newest), folder=str(newest.relative_to(folder)))


def read_rank_traces(folder: Path) -> Traces:
    """Of the traces of all ranks in a folder."""
    ranks = {int(p.name[4:].partition("_")[0]): p for p in folder.glob("rank*_trace.json")}
    chosen = sorted(ranks)[:MOST_TRACES]
    found = {rank: read_trace(ranks[rank]) for rank in chosen}
    return Traces(
        folder=str(folder),
        steps=max((trace.steps for trace in found.values()), default=0),
        compute_s={rank: trace.compute / max(trace.steps, 1) for rank, trace in found.items()},
        exposed={rank: trace.exposed / (trace.span or 1) for rank, trace in found.items()},
        idle={rank: trace.idle / (trace.span or 1) for rank, trace in found.items()},
        left_out=len(ranks) - len(chosen),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _largest(rows: Sequence[Row], key: str) -> float | None:
    known = [row[key] for row in rows if row.get(key) is not None]
    return max(known, default=None)
