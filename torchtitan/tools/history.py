"""`RunHistory`: the contents of a run's dump folder as values, for every tool that looks at runs.

    metrics.jsonl      rows: reports, validations, events
    recipe.toml        the resolved recipe of the latest launch
    environment.json   its time, command, ranks, device and versions
    data_ledger.jsonl  the samples that each session has read
    events/            the event log of each rank
    profile_traces/    traces of the profiler
    comm_traces/       the step that each rank is in, and its traces if it failed

Files are read as they are found. The run may still be writing them, or may have been killed in the
middle of a line, so a last line that is not complete is left out. Rows that an older version wrote
are read with today's names.
"""

import json
import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from torchtitan.config import ConfigError, RecipeError, read_file
from torchtitan.device import DeviceType, peak_flops
from torchtitan.flight_recorder import RankTrace, is_gone, read_traces, report
from torchtitan.job import RECIPE_FILE
from torchtitan.metrics.data_ledger import LEDGER_FILE, ledger_rows
from torchtitan.metrics.sinks import rate_key, unit_of
from torchtitan.provenance import ENVIRONMENT_FILE
from torchtitan.timeline import PHASES

Row = dict[str, Any]

OLD_NAMES: Final = {
    "agree": "sync",
    "time/agree": "time/sync",
    "slowest/agree": "slowest/sync",
    "slowest/agree_pct": "slowest/sync_pct",
    "stepped_over": "skipped_samples",
}
"""Keys of rows of older versions, and their current names."""

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class RunState:
    """The progress of a run, or its end."""

    is_alive: bool
    """Whether the run is alive, as far as is known: processes on other machines are not checked."""
    step: int
    ranks: int
    words: str


@dataclass(frozen=True)
class RunHistory:
    """A run, as far as its dump folder was read."""

    folder: Path
    rows: list[Row] = field(default_factory=list)
    """All rows of `metrics.jsonl`, in order: reports, validations and events."""

    @classmethod
    def open(cls, folder: Path) -> "RunHistory":
        """Open the dump folder of a run.

        Raises:
            ConfigError: if no run has written metrics there.
        """
        if not (folder / METRICS_FILE).is_file():
            found = sorted(path.parent for path in folder.glob(f"*/{METRICS_FILE}"))
            hint = f"; did you mean {' or '.join(map(str, found[:3]))}?" if found else ""
            what = "is not a folder" if not folder.is_dir() else f"has no {METRICS_FILE}"
            raise ConfigError(f"{folder}: {what}; wanted the job.dump_folder of a run{hint}")
        return cls(folder, list(parse_rows((folder / METRICS_FILE).read_bytes())))

    @cached_property
    def reports(self) -> list[Row]:
        """The rows about training: those with a loss and a speed."""
        return [row for row in self.rows if "tps" in row]

    @cached_property
    def unit(self) -> str:
        """The unit that the run counts: tokens, or what its task counts."""
        rate = rate_key(self.reports[0]) if self.reports else None
        return unit_of(rate or "tps")

    @cached_property
    def recipe(self) -> Mapping[str, Any]:
        """The resolved recipe of the latest launch, by dotted keys; empty if there is none."""
        path = self.folder / RECIPE_FILE
        problems: list[str] = []
        settings = read_file(path, problems) if path.is_file() else {}
        if problems:
            raise RecipeError(problems)
        return {".".join(key): setting.value for key, setting in settings.items()}

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """Time, command, ranks, device and versions of the latest launch; empty if unknown."""
        path = self.folder / ENVIRONMENT_FILE
        if not path.is_file():
            return {}
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path}: damaged: {error}") from None
        return found

    @property
    def device(self) -> str | None:
        """The name of the device of the latest launch; None if unknown."""
        return self.environment.get("device")

    @property
    def device_type(self) -> DeviceType:
        """The type of that device."""
        is_known = self.device is not None and peak_flops(self.device) is not None
        return "cuda" if is_known or self.environment.get("device_type") == "cuda" else "cpu"

    @cached_property
    def data_ledger(self) -> list[Row]:
        """The rows of the ledger of samples; empty if there is none."""
        path = self.folder / LEDGER_FILE
        return list(ledger_rows(path)) if path.is_file() else []

    @property
    def ranks(self) -> int | None:
        """The number of ranks of the latest launch; None if unknown."""
        return self.environment.get("ranks")

    @cached_property
    def rank_events(self) -> dict[int, list[Row]]:
        """The event log of each rank of the latest launch, in order of ranks."""
        paths = (self.folder / "events").glob("rank*.jsonl")
        logs = {int(path.stem.removeprefix("rank")): path for path in paths}
        # An earlier launch may have had more ranks.
        ours = (rank for rank in sorted(logs) if self.ranks is None or rank < self.ranks)
        return {rank: list(parse_rows(logs[rank].read_bytes())) for rank in ours}

    def last_event(self, kind: str, rank: int = 0) -> Row:
        """The newest event of a kind in the log of a rank; empty if there is none."""
        log = self.rank_events.get(rank, ())
        return next((row for row in reversed(log) if row["event"] == kind), {})

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that rank 0 sends in a step, by axis; empty if not recorded."""
        sent = self.last_event("traffic").items()
        return {k.removeprefix("sent/"): float(v) for k, v in sent if k.startswith("sent/")}

    @cached_property
    def expert_loads(self) -> dict[str, list[float]]:
        """Share of each expert in the choices of its block, by block, when last measured."""
        found: dict[str, list[float]] = {}
        row: Row = next((r for r in reversed(self.rows) if r.get("event") == "experts"), {})
        for key in (key for key in row if key.startswith("load/")):
            found.setdefault(key.split("/")[1], []).append(row[key])
        return found

    def report_steps(self) -> list[tuple[Row, int]]:
        """The reports, each with the number of steps that it covers."""
        found: list[tuple[Row, int]] = []
        before = 0
        for row in self.rows:
            if row.get("event") == "rollback":
                before = row["step"]
            elif "tps" in row:
                if row["step"] > before:
                    found.append((row, row["step"] - before))
                before = row["step"]
        return found

    @property
    def traces_folder(self) -> Path:
        """The folder of profiler traces, with a folder for each trace."""
        key = "profiling.save_traces_folder"
        return self.folder / str(self.recipe.get(key, "profile_traces"))

    def newest_trace(self) -> dict[int, Path]:
        """The files of the newest trace, by rank."""
        paths = list(self.traces_folder.glob("*/rank*_trace.json"))
        return traces_in(max(paths, key=lambda path: path.stat().st_mtime).parent) if paths else {}

    @property
    def rank_traces_folder(self) -> Path:
        """The folder of the steps of the ranks, and of their traces if they failed."""
        return self.folder / str(self.recipe.get("comm.save_traces_folder", "comm_traces"))

    def state(self) -> RunState:
        """The state of the run, by the notes of its ranks at every step."""
        try:
            traces = read_traces(self.rank_traces_folder)
        except ConfigError:
            return RunState(False, 0, 0, "unknown: its ranks left no record of their steps")
        step, ranks = max(trace.step for trace in traces), max(t.world_size for t in traces)
        if all(trace.state == "finished" for trace in traces):
            return RunState(False, step, ranks, f"finished at step {step}")
        if any(trace.state == "ended" or trace.failure or trace.crash for trace in traces):
            return RunState(False, step, ranks, report(traces)[0])
        gone = [str(trace.rank) for trace in traces if _is_gone(trace)]
        if gone:
            words = f"stopped without a message at step {step}: rank {', '.join(gone)} is gone"
            return RunState(False, step, ranks, words)
        known = [trace for trace in traces if not trace.kept_at]
        if not known:
            step = max((row["step"] for row in self.rows), default=0)
            return RunState(True, step, ranks, f"on other machines; its last report: step {step}")
        ago = max(time.time() - max(trace.time for trace in known), 0.0)
        return RunState(True, step, ranks, f"in step {step}, which began {ago:.0f} s ago")


def traces_in(folder: Path) -> dict[int, Path]:
    """The traces of the profiler in a folder, by rank."""
    found = {int(p.name[4:].partition("_")[0]): p for p in folder.glob("rank*_trace.json")}
    return dict(sorted(found.items()))


def _is_gone(trace: RankTrace) -> bool:
    """Whether the process of a rank was on this machine, and no longer exists."""
    is_here = trace.host == socket.gethostname()
    return is_here and trace.state != "finished" and is_gone(trace.pid)


def parse_rows(text: bytes) -> Iterator[Row]:
    """Parse lines of JSON, with the current names of keys; incomplete lines are left out."""
    for line in text.split(b"\n"):
        try:
            row = json.loads(line) if line else None
        except ValueError:
            continue
        if isinstance(row, dict):
            yield add_token_keys(renamed(row))


def add_token_keys(row: Row) -> Row:
    """Add the keys of tokens to a row whose task counts something else."""
    rate = rate_key(row)
    if rate is None or rate == "tps":
        return row
    return row | {"tps": row[rate], "tokens": row[unit_of(rate)]}


def renamed(row: Row) -> Row:
    """Rename the keys of a row, and of the dictionaries in it, to the current ones."""
    return {
        OLD_NAMES.get(key, key): renamed(value) if isinstance(value, dict) else value
        for key, value in row.items()
    }


def seconds_of(reports: Iterable[tuple[Row, int]]) -> tuple[dict[str, float], dict[str, float]]:
    """Sum the seconds of each phase of a step, in order, and of each pause between steps.

    Args:
        reports: reports, each with the number of steps that it covers.
    """
    phases: dict[str, float] = {}
    pauses: dict[str, float] = {}
    for row, steps in reports:
        for key, value in row.items():
            if key.startswith("time/"):
                name = key.removeprefix("time/")
                phases[name] = phases.get(name, 0.0) + value * steps
            elif key.endswith("_s") and key != "eta_s" and isinstance(value, float):
                name = key.removesuffix("_s")
                pauses[name] = pauses.get(name, 0.0) + value
    return {name: phases[name] for name in PHASES if name in phases}, pauses


def median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
