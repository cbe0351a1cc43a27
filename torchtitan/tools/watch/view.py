"""A run as lines of text: where it is, whether it is alive, how it learns, how fast it is."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.tools.history import METRICS_FILE, History, Row
from torchtitan.tools.watch.rows import RunSummary, Tail, sparkline

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

LABEL_WIDTH = 12
LAST_EVENTS = 5

# A report may take this many times as long as the steps to it, and never less than these seconds:
# saving, validating and compiling take time that steps do not tell of.
PATIENCE, LEAST_SECONDS = 3, 30


@dataclass
class View:
    """A run as far as it was read; rich can print it."""

    history: History
    tail: Tail
    seen: RunSummary = field(default_factory=RunSummary)

    @classmethod
    def open(cls, folder: Path) -> "View":
        """The run of a dump folder.

        Raises:
            ConfigError: where no run has written metrics.
        """
        view = cls(History.open(folder), Tail(folder / METRICS_FILE))
        view.update()
        return view

    def update(self) -> None:
        """Read what is new."""
        rows, is_other = self.tail.new_rows()
        if is_other:
            # Another launch may have another recipe.
            self.history, self.seen = History(self.history.folder), RunSummary()
        for row in rows:
            self.seen.take(row)

    def lines(self, width: int, now: float) -> Iterator[tuple[str, str]]:
        """Labels and texts; `width` characters are to be had for both, `now` is Unix seconds."""
        yield "run", title(self.history)
        yield "state", state(self.history.recipe, self.seen, now)
        if self.seen.report:
            yield from numbers(self.history.recipe, self.seen, width - LABEL_WIDTH, now)
        for number, row in enumerate(self.seen.events[-LAST_EVENTS:]):
            yield "" if number else "events", event_line(row)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[Text]":
        from rich.text import Text

        for label, told in self.lines(options.max_width, time.time()):
            style = "yellow" if label == "state" and told.startswith("silent") else ""
            parts = (f"{label:<{LABEL_WIDTH}}", "dim"), (told, style)
            yield Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
        yield Text()


def title(history: History) -> str:
    """What the run is called, what it trains, and on what."""
    recipe, environment = history.recipe, history.environment
    name = recipe.get("metrics.run_name") or history.folder.resolve().name
    model = " ".join(str(recipe[key]) for key in ("model.name", "model.flavor") if key in recipe)
    where = f"{environment['ranks']} x {environment['device']}" if environment else ""
    tags = ", ".join(recipe.get("metrics.tags", ()))
    return "  ".join(part for part in (name, model, where, tags) if part)


def state(recipe: Mapping[str, Any], seen: RunSummary, now: float) -> str:
    """Whether the run seems alive, in plain words."""
    if not seen.report or seen.time is None:
        return "no report yet"
    since = max(now - seen.time, 0.0)
    step, ago = seen.report["step"], duration(since)
    if step >= recipe.get("training.steps", float("inf")):
        return f"finished at step {step:,}, {ago} ago"
    log_freq = recipe.get("metrics.log_freq", 1)
    due = (log_freq - step % log_freq) * (seen.report.get("step_time") or 0.0)
    told = f"the last row came {ago} ago; steps to the next report take {duration(due)}"
    if since <= max(PATIENCE * due, LEAST_SECONDS):
        return f"alive: {told}"
    return f"silent: {told}. It saves, validates, compiles or hangs, or it is gone"


def numbers(
    recipe: Mapping[str, Any], seen: RunSummary, width: int, now: float
) -> Iterator[tuple[str, str]]:
    """The last report, and the curves that lead to it."""
    report, room = seen.report, max(width - 10, 1)
    step, steps = report["step"], recipe.get("training.steps")
    done = f"{step:,} of {steps:,} ({step / steps:.0%})" if steps else f"{step:,}"
    eta = report.get("eta_s")
    if eta and seen.time is not None:
        done += f", {duration(max(eta - (now - report.get('time', now)), 0.0))} left"
    yield "step", done
    yield "loss", f"{sparkline(seen.losses, room)}  {show(report.get('loss'), '.4f')}"
    yield "grad norm", f"{sparkline(seen.grad_norms, room)}  {show(report.get('grad_norm'), '.4f')}"
    if seen.validations:
        last, best = (
            f"{show(row['validation_loss'], '.4f')} at step {row['step']:,}"
            for row in (seen.validations[-1], seen.best_validation)
        )
        yield "validation", f"{last}; best {best}"
    yield "tokens", show(report.get("tokens"), ",d")
    now_tps, mean_tps = show(report["tps"], ",.0f"), show(seen.mean_tps, ",.0f")
    a_step = f"{show(report.get('step_time'), '.3g')} s a step"
    yield "speed", f"{now_tps} tokens/s/device now, {mean_tps} mean; {a_step}"
    yield "mfu", show(report.get("mfu"), ".1%")
    memory = show(report.get("memory_gib"), ".2f"), show(report.get("memory_pct"), ".0f")
    yield "memory", "{} GiB ({}%)".format(*memory)
    yield "data", f"waited for {show(report.get('data_pct'), '.1f')}% of the time"
    yield from slowest(report)


def slowest(report: Row) -> Iterator[tuple[str, str]]:
    """Where there are several ranks, the one that is furthest behind the others in a phase."""
    over = {key: value for key, value in report.items() if key.startswith("slowest/")}
    phases = [key.removesuffix("_pct") for key in over if key.endswith("_pct")]
    if phases:
        worst = max(phases, key=lambda phase: float(over[f"{phase}_pct"] or 0.0))
        percent = show(over[f"{worst}_pct"], ".0f")
        phase = worst.removeprefix("slowest/")
        yield "slowest", f"rank {over[worst]} in {phase}: {percent}% of a step behind the median"


def event_line(row: Row) -> str:
    """When something happened, at which step, what it was, and its details."""
    details = {name: row[name] for name in row.keys() - {"event", "step", "time"}}
    told = ", ".join(f"{name.replace('_', ' ')} {details[name]}" for name in row if name in details)
    at = row.get("time")
    clock = time.strftime("%H:%M:%S", time.localtime(at)) if at is not None else " " * 8
    return f"{clock}  step {row['step']:,}  {row['event']}{f': {told}' if told else ''}"


def show(value: Any, spec: str) -> str:
    """A number, where it is known."""
    return "n/a" if value is None else format(value, spec)


def duration(seconds: float) -> str:
    """As 2.5 s, or 0:01:30."""
    return f"{seconds:.1f} s" if seconds < 10 else str(timedelta(seconds=round(seconds)))
