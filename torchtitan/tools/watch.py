"""Show the progress of runs, redrawn every few seconds until Ctrl-C.

The run itself is not asked: it may be on another machine, as long as its folder can be read here.
So whether it is alive is judged by when its last row came, and when the next one is due.
"""

import contextlib
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchtitan.tools.history import Row, RunHistory, show
from torchtitan.tools.options import Verb, number, verb

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

SECONDS = number("seconds, above 0 and at most 3600", lambda seconds: 0 < seconds <= 3600)
app = verb()


@app.command(cls=Verb, help=__doc__)
def watch(
    runs: Annotated[
        list[Path], typer.Argument(help="Folder of a run (job.dump_folder): outputs/x.")
    ],
    refresh: Annotated[
        float,
        typer.Option(
            parser=SECONDS, metavar="SECONDS", help="Time between two redraws (default: 2)."
        ),
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    views = [View(RunHistory.open(folder)) for folder in runs]
    on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    console = Console(width=None if on_terminal else 100, highlight=False)
    if once or not on_terminal:
        console.print(*views, sep="\n")
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(Group(*views), refresh=True)
            time.sleep(refresh)
            for view in views:
                view.update()


BLOCKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
LABEL_WIDTH = 12
LAST_EVENTS = 5
MAP_ROWS = 8
"""Maximum number of blocks whose experts are shown."""
MEASUREMENTS = ("precision", "statistics", "experts")
"""Events of regular measurements, which are not incidents."""

# A report may take this many times as long as the steps to it, and never less than these seconds:
# time for saving, validating and compiling is not part of a step's.
SILENT_FACTOR, SILENT_SECONDS = 3, 30


@dataclass
class View:
    """A view of a run, which rich can print."""

    history: RunHistory

    def update(self) -> None:
        """Read the new rows."""
        self.history = self.history.updated()

    def lines(self, width: int, now: float) -> Iterator[tuple[str, str]]:
        """Labels and texts, which have `width` characters together; `now` is in Unix seconds."""
        yield "run", title(self.history)
        yield "state", state(self.history, now)
        if self.history.reports:
            yield from numbers(self.history, width - LABEL_WIDTH, now)
        for place, row in enumerate(incidents(self.history.rows)[-LAST_EVENTS:]):
            yield "" if place else "events", event_line(row)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[Text]":
        from rich.text import Text

        for label, text in self.lines(options.max_width, time.time()):
            style = "yellow" if label == "state" and text.startswith("silent") else ""
            parts = (f"{label:<{LABEL_WIDTH}}", "dim"), (text, style)
            yield Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
        yield Text()


def title(history: RunHistory) -> str:
    """The name of the run, its model, its devices and its tags."""
    name = history.recipe.get("metrics.run_name") or history.folder.resolve().name
    where = f"{history.ranks} x {history.environment['device']}" if history.ranks else ""
    tags = ", ".join(history.recipe.get("metrics.tags", ()))
    return "  ".join(part for part in (name, history.model, where, tags) if part)


def state(history: RunHistory, now: float) -> str:
    """Whether the run seems alive, by when its last row came and when the next report is due."""
    if not history.reports:
        return "no report yet"
    report, recipe = history.reports[-1], history.recipe
    step, since = report["step"], max(now - last_time(history), 0.0)
    ago = duration(since)
    if step >= recipe.get("training.steps", math.inf):
        return f"finished at step {step:,}, {ago} ago"
    log_freq = recipe.get("metrics.log_freq", 1)
    due = (log_freq - step % log_freq) * (report.get("step_time") or 0.0)
    is_due = since >= due
    expected = (
        f"was expected after {duration(due)}" if is_due else f"expected in {duration(due - since)}"
    )
    text = f"last report {ago} ago; next {expected}"
    if since <= max(SILENT_FACTOR * due, SILENT_SECONDS):
        return f"alive: {text}"
    return f"silent: {text}. It may be saving, validating, compiling or hung, or have exited"


def numbers(history: RunHistory, width: int, now: float) -> Iterator[tuple[str, str]]:
    """The last report, and the curves that lead to it."""
    report, room = history.reports[-1], max(width - 10, 1)
    step, steps = report["step"], history.recipe.get("training.steps")
    done = f"{step:,} of {steps:,} ({step / steps:.0%})" if steps else f"{step:,}"
    if eta := report.get("eta_s"):
        done += f", {duration(max(eta - (now - report.get('time', now)), 0.0))} left"
    yield "step", done
    for label, key in (("loss", "loss"), ("grad norm", "grad_norm")):
        curve = sparkline([reported(row.get(key)) for row in history.reports], room)
        yield label, f"{curve}  {show(report.get(key), '.4f')}"
    if validations := history.validations:
        best = min(validations, key=lambda row: reported(row["validation_loss"], math.inf))
        last, lowest = (
            f"{show(row['validation_loss'], '.4f')} at step {row['step']:,}"
            for row in (validations[-1], best)
        )
        yield "validation", f"{last}; best {lowest}"
    yield history.unit, show(report.get("tokens"), ",d")
    speeds = show(report["tps"], ",.0f"), show(mean_tps(history.reports), ",.0f")
    a_step = f"{show(report.get('step_time'), '.3g')} s per step"
    yield "speed", "{} {unit}/s/device now, {} mean; {}".format(*speeds, a_step, unit=history.unit)
    if report.get("mfu") is not None:
        yield "mfu", show(report["mfu"], ".1%")
    memory = show(report.get("memory_gib"), ".2f"), show(report.get("memory_pct"), ".0f")
    yield "memory", "{} GiB ({}%)".format(*memory)
    yield "data", f"{show(report.get('data_pct'), '.1f')}% of the time spent waiting"
    yield from slowest(report)
    yield from experts(history)


def experts(history: RunHistory) -> Iterator[tuple[str, str]]:
    """The balance of experts, and the load of each in some blocks, when last measured."""
    report, loads = history.reports[-1], [*history.expert_loads.items()]
    if (busiest := report.get("experts/busiest_share")) is None:
        return
    entropy = show(report["experts/entropy"], ".3f")
    yield "experts", f"busiest {busiest:.1%} of the tokens' choices, entropy {entropy}"
    for block, shares in loads[:: -(-len(loads) // MAP_ROWS) or 1]:
        yield f"  {block}"[:LABEL_WIDTH], sparkline([0.0, *shares], len(shares) + 1)[1:]


def slowest(report: Row) -> Iterator[tuple[str, str]]:
    """The rank that is furthest behind the others in a phase, if there are several."""
    over = {key: value for key, value in report.items() if key.startswith("slowest/")}
    phases = [key.removesuffix("_pct") for key in over if key.endswith("_pct")]
    if phases:
        worst = max(phases, key=lambda phase: float(over[f"{phase}_pct"] or 0.0))
        percent = show(over[f"{worst}_pct"], ".0f")
        phase = worst.removeprefix("slowest/")
        yield "slowest", f"rank {over[worst]} in {phase}: {percent}% of a step behind the median"


def last_time(history: RunHistory) -> float:
    """The time of the last row in Unix seconds; 0 if unknown."""
    return next((row["time"] for row in reversed(history.rows) if "time" in row), 0.0)


def mean_tps(reports: Sequence[Row]) -> float | None:
    """Units a second and device, over all reports with a speed."""
    units = device_seconds = 0.0
    for before, row in zip([{}, *reports], reports, strict=False):
        if row["tps"]:
            trained = row["tokens"] - before.get("tokens", 0)
            units += trained
            device_seconds += trained / row["tps"]
    return units / device_seconds if device_seconds else None


def incidents(rows: Sequence[Row]) -> list[Row]:
    """The incidents of the run, skipped steps included."""
    found = []
    for row in rows:
        if "event" in row:
            found += [row] if row["event"] not in MEASUREMENTS else []
        elif row.get("skipped"):
            event = {"event": "skipped", "step": row["step"], "time": row.get("time")}
            why = {"because": row["skipped_because"]} if "skipped_because" in row else {}
            found.append({**event, "steps": row["skipped"], **why})
    return found


def event_line(row: Row) -> str:
    """Format an event: its time, its step, its kind and its details."""
    rest = {name: value for name, value in row.items() if name not in ("event", "step", "time")}
    details = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in rest.items())
    at = row.get("time")
    clock = time.strftime("%H:%M:%S", time.localtime(at)) if at is not None else " " * 8
    return f"{clock}  step {row['step']:,}  {row['event']}{f': {details}' if details else ''}"


def sparkline(values: list[float], width: int) -> str:
    """Draw a curve in at most `width` characters, each the mean of equally many values."""
    columns = min(width, len(values))
    edges = [n * len(values) // columns for n in range(columns + 1)] if columns else []
    pieces = [values[begin:end] for begin, end in itertools.pairwise(edges)]
    means = [math.fsum(piece) / len(piece) for piece in pieces]
    finite = [mean for mean in means if math.isfinite(mean)]
    lowest, highest = min(finite, default=0.0), max(finite, default=0.0)

    def block(mean: float) -> str:
        if not math.isfinite(mean):
            return NOT_FINITE
        height = (mean - lowest) / (highest - lowest) if highest > lowest else 0.0
        return BLOCKS[round(height * (len(BLOCKS) - 1))]

    return "".join(map(block, means))


def reported(value: object, otherwise: float = math.nan) -> float:
    """Convert a reported value, which is null if it was not finite."""
    is_finite = isinstance(value, float | int) and math.isfinite(value)
    return float(value) if is_finite else otherwise  # type: ignore[arg-type]


def duration(seconds: float) -> str:
    """Format seconds as 2.5 s, 25 s, or 0:01:30."""
    if round(seconds) < 60:
        return f"{seconds:.{int(seconds < 10)}f} s"
    return str(timedelta(seconds=round(seconds)))
