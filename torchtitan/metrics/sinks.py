"""Sinks of metrics: the console, `metrics.jsonl`, TensorBoard, Weights & Biases, MLflow.

Every sink is given the same dictionary, made by `Meter`, and writes what it can show of it. What
went wrong while writing is raised, never passed over: a run whose curve is lost should say so. The
meter catches it, continues without that sink, and names it in the run's summary.
"""

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtitan.config import counted
from torchtitan.logging import (
    QUIET_SECONDS,
    TITLE,
    logger,
    make_console,
    make_progress,
    on_terminal,
)
from torchtitan.timeline import Timeline


def pixels(picture: Tensor) -> npt.NDArray[np.uint8]:
    """Convert a picture (3, H, W) in 0..1 to (H, W, 3) in 0..255."""
    whole = (picture * 255).round().to(torch.uint8)
    return np.ascontiguousarray(whole.permute(1, 2, 0).cpu().numpy())


Value = float | int | str | None
NOTABLE_WAIT = 10.0
"""Percent of the time."""
RATES = {"tps": "tok/s"}
"""Speeds by their keys, as a row has room for them."""
STOPS = ("KeyboardInterrupt", "SystemExit", "Terminated")
"""Exceptions that end a run at request, which are no failures."""
Metrics = Mapping[str, Value]


@dataclass(frozen=True)
class SinkContext:
    """Facts about the run that a sink writes for."""

    folder: Path
    """The run's dump folder."""
    rank: int = 0
    total_steps: int = 0
    tensorboard_folder: str = "tb"
    color: bool = True
    run_name: str | None = None
    """Name of the run; None: that of its folder."""
    tags: Sequence[str] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The resolved recipe, shown by sinks that can."""

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.run_name or self.folder.resolve().name


class Sink(Protocol):
    """Opened, written to at every due step, closed once, also when the run fails."""

    def __init__(self, context: SinkContext) -> None: ...

    def open(self, start_step: int, /) -> None:
        """Begin; `start_step` is the step resumed from, 0 for a fresh run.

        Also called while it is open, when the run rolls back: what it wrote of later steps is to
        be treated as by a run that resumes there.
        """

    def write(self, step: int, metrics: Metrics, /) -> None:
        """Take the values of one step."""

    # One with a method `picture(step, picture)` is also given pictures: (3, H, W) in 0..1. One with
    # a method `after_step(step)` is also told of every step, before the row that may be due.

    def close(self, summary: Metrics, /) -> None:
        """End; `summary` is the run as a whole, see `Meter.summary`."""


class Monitor(Sink, Protocol):
    """Sink that is open before the run is built, and shows whether the run is alive."""

    def watch(
        self,
        timeline: Timeline,
        /,
        *,
        unit: str,
        rate: str,
        total_steps: int,
        saved_step: Callable[[], int | None],
        is_finished: Callable[[], bool],
    ) -> None:
        """Watch a run that is being built; `unit` and `rate` are those of the task.

        Args:
            saved_step: the step of the newest checkpoint of this process, if any.
        """

    def after_step(self, step: int, /) -> None:
        """Note that a step was done, also one that is void."""


class Console:
    """One line a row through the log, and a closing summary.

    Between rows a progress bar moves on a terminal. Elsewhere the log has the step twice a minute.
    """

    def __init__(self, context: SinkContext) -> None:
        self.total, self.color = context.total_steps, context.color
        recipe = context.recipe
        held_out = recipe.get("validation.dataset_path") or recipe.get("validation.dataset")
        if recipe.get("data.validation_fraction"):
            held_out = "held-out documents"
        self.held_out = held_out if isinstance(held_out, str) else ""
        """Name of the validation data set if there is only one; rows name one of several."""
        self.bar: Any = None
        self.clock = time.monotonic
        self.spoke = self.clock()

    def open(self, start_step: int) -> None:
        if self.bar is not None:
            self.bar.update(0, completed=start_step)
        if self.bar is not None or not on_terminal():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn

        columns = SpinnerColumn(), TITLE, BarColumn(None), MofNCompleteColumn()
        terminal = make_console(stderr=True, no_color=True if not self.color else None)
        # Its thread also draws while a step lasts; when it is done it is erased, for the summary.
        live = {"auto_refresh": True, "redirect_stdout": True, "redirect_stderr": True}
        self.bar = make_progress(
            *columns, "{task.fields[eta]}", console=terminal, transient=True, **live
        )
        self.bar.add_task("steps", total=self.total, completed=start_step, eta="")
        self.bar.start()

    def after_step(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(0, completed=step)
        elif self.clock() - self.spoke >= QUIET_SECONDS:
            self._say(f"step {step:>{len(str(self.total))}}/{self.total}")

    def write(self, step: int, metrics: Metrics) -> None:
        if "event" in metrics:
            return  # the log says it in words
        line = row_line(step, self.total, metrics)
        if "validation_loss" in metrics and self.held_out:
            line += f"  on {self.held_out}"
        self._say(line)
        if self.bar is not None and "eta_s" in metrics:
            self.bar.update(0, completed=step, eta=f"eta {_duration(metrics['eta_s'])}")

    def _say(self, line: str) -> None:
        logger.info("%s", line)
        self.spoke = self.clock()

    def close(self, summary: Metrics) -> None:
        if self.bar is not None:
            self.bar.stop()
        logger.info("%s", summary_text(summary))


class Jsonl:
    """`metrics.jsonl`: one strict JSON object a row, written out at once; the record of one run.

    JSON has no NaN or infinity: such a value is written as null, and named under "non_finite", as
    in `{"step": 7, "loss": null, "non_finite": {"loss": "nan"}}`. "time" is Unix seconds.

    A fresh run moves an older file aside (`metrics.1.jsonl`, 2, ...). A resumed one continues
    the file: rows past the step it resumes from, left by a process that went beyond its last
    checkpoint, are moved to `metrics.superseded.jsonl`, so that the curve is that of one run.

    Rows that the disk has no room for are kept, and written when it has; a run whose checkpoints
    are to survive a full disk must not end because of its curve.
    """

    def __init__(self, context: SinkContext) -> None:
        name = "metrics" if context.rank == 0 else f"metrics.rank{context.rank}"
        self.path = context.folder / f"{name}.jsonl"
        self.file: FileIO | None = None
        self.waiting = b""

    def open(self, start_step: int) -> None:
        if self.file is not None:
            self._write_out()
            self.file.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            if start_step == 0:
                self._set_aside()
            else:
                self._drop_after(start_step)
        self.file = FileIO(self.path, "a")

    def write(self, step: int, metrics: Metrics) -> None:
        row: dict[str, object] = {"step": step, "time": round(time.time(), 3), **metrics}
        lost = {k: str(v) for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        if lost:
            row |= dict.fromkeys(lost) | {"non_finite": lost}
        self.append(row)

    def append(self, row: Mapping[str, object]) -> None:
        """Write a row, or keep it until the disk has room."""
        assert self.file is not None, "a row before `open`"
        self.waiting += json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            self._write_out()
        except OSError as error:
            logger.error("%s: %s; unwritten rows are kept in memory", self.path, error.strerror)

    def picture(self, step: int, picture: Tensor) -> None:
        """Write the picture into `pictures/`, next to the file of rows."""
        from PIL import Image

        path = self.path.parent / "pictures" / f"step-{step:06}.png"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels(picture)).save(path)
        except OSError as error:
            logger.error("%s: %s; the picture is lost", path, error.strerror)

    def close(self, _summary: Metrics) -> None:
        if self.file is not None:
            with self.file:
                self._write_out()

    def _write_out(self) -> None:
        assert self.file is not None, "Jsonl is not open"
        while self.waiting:
            self.waiting = self.waiting[self.file.write(self.waiting) :]

    def _sibling(self, tag: str | int) -> Path:
        return self.path.with_name(f"{self.path.stem}.{tag}.jsonl")

    def _set_aside(self) -> None:
        number = 1
        while self._sibling(number).exists():
            number += 1
        self.path.rename(self._sibling(number))
        logger.info("%s: an earlier run's file, renamed %s", self.path, self._sibling(number).name)

    def _drop_after(self, start_step: int) -> None:
        kept, superseded = [], []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            step = _step_of(line)
            if step is None:
                what = "an incomplete line of a process that was killed while writing"
                logger.warning("%s: dropped %s", self.path, what)
            elif step > start_step:
                superseded.append(line)
            else:
                kept.append(line)
        if superseded:
            moved_to = self._sibling("superseded")
            with moved_to.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in superseded)
            rows = counted(len(superseded), "row")
            where = f"past step {start_step} moved to {moved_to.name}"
            logger.info("%s: %s %s", self.path, rows, where)
        whole = self.path.with_name(f"{self.path.name}.new")
        whole.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        whole.replace(self.path)


class TensorBoard:
    """A sink with every number as a scalar of its name, and the recipe as a text.

    A process that resumes writes a file of its own, whose `purge_step` invalidates the points of
    earlier files from that step on, texts included. So the recipe is written at the first step that
    it trains.
    """

    def __init__(self, context: SinkContext) -> None:
        self.context = context
        self.folder = context.folder / context.tensorboard_folder
        self.writer: Any = None

    def open(self, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self.writer is not None:
            self.writer.close()
        # A fresh run also forgets what an earlier one in this folder said before its first step.
        purge_step = start_step + 1 if start_step else 0
        self.writer = SummaryWriter(str(self.folder), purge_step=purge_step)
        self.writer.add_text("run", recipe_text(self.context), start_step + 1)

    def write(self, step: int, metrics: Metrics) -> None:
        for name, value in _numbers(metrics).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def picture(self, step: int, picture: Tensor) -> None:
        self.writer.add_image("validation", picture, step)

    def close(self, _summary: Metrics) -> None:
        if self.writer is not None:
            self.writer.close()


class WandB:
    """A Weights & Biases run in the dump folder, with the recipe as its config.

    Its id is kept in `wandb_run_id`, so that a resumed run continues it; a fresh one gets a new
    id. W&B refuses a step lower than the last, and after a resume or a rollback steps come again.
    So the step is a metric of its own, which all others are drawn over.

    W&B's own environment variables win: WANDB_PROJECT, WANDB_MODE, WANDB_NAME, WANDB_TAGS,
    WANDB_RUN_ID, WANDB_RESUME, ...
    """

    def __init__(self, context: SinkContext) -> None:
        self.context = context
        self.id_file = context.folder / "wandb_run_id"
        self.run: Any = None

    def open(self, start_step: int) -> None:
        import wandb

        if self.run is not None:
            return  # a rollback; its steps come again in the same run
        self.context.folder.mkdir(parents=True, exist_ok=True)
        resumes, earlier = start_step > 0, ""
        if resumes and self.id_file.exists():
            earlier = self.id_file.read_text(encoding="utf-8").strip()
        defaults: dict[str, tuple[str, Any]] = {
            "WANDB_PROJECT": ("project", "torchtitan"),
            "WANDB_NAME": ("name", self.context.name),
            "WANDB_TAGS": ("tags", list(self.context.tags)),
            "WANDB_RUN_ID": ("id", earlier or None),
            "WANDB_RESUME": ("resume", "allow" if resumes else None),
        }
        ours = dict(default for name, default in defaults.items() if name not in os.environ)
        config = dict(self.context.recipe)
        self.run = wandb.init(dir=str(self.context.folder), config=config, **ours)
        self.id_file.write_text(f"{self.run.id}\n", encoding="utf-8")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Metrics) -> None:
        self.run.log({"step": step, **_numbers(metrics)})

    def picture(self, step: int, picture: Tensor) -> None:
        import wandb

        # Of floating-point numbers it would take 1 for nearly black.
        self.run.log({"step": step, "validation": wandb.Image(pixels(picture))})

    def close(self, summary: Metrics) -> None:
        if self.run is not None:
            self.run.summary.update({f"summary/{name}": value for name, value in summary.items()})
            self.run.finish(exit_code=1 if summary["stopped_by"] else 0)


def _allowed(name: str) -> str:
    """Return a name that MLflow takes, without the parts of a path that it refuses."""
    parts = re.sub(r"[^\w.\- /]", "_", name).split("/")
    return "/".join(part for part in parts if part.strip("."))


class MLflow:
    """An MLflow run, with the recipe as its parameters.

    Its id is kept in `mlflow_run_id`, so that a resumed run continues it; a fresh one is a new run.
    Steps that come again after a resume or a rollback have both values.

    MLflow's own environment variables win: MLFLOW_TRACKING_URI (without it, a database in the dump
    folder), MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, ...
    """

    def __init__(self, context: SinkContext) -> None:
        self.context = context
        self.id_file = context.folder / "mlflow_run_id"
        self.client: Any = None
        self.run_id = ""

    def open(self, start_step: int) -> None:
        # A server that is gone fails the sink within a minute, and not after many.
        for name, value in (("REQUEST_TIMEOUT", "15"), ("REQUEST_MAX_RETRIES", "2")):
            os.environ.setdefault(f"MLFLOW_HTTP_{name}", value)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        if self.client is not None:
            return  # a rollback; its steps come again in the same run
        self.context.folder.mkdir(parents=True, exist_ok=True)
        own = f"sqlite:///{self.context.folder.resolve() / 'mlflow.db'}"
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or own)
        self.run_id = os.environ.get("MLFLOW_RUN_ID", "")
        if not self.run_id and start_step > 0 and self.id_file.exists():
            self.run_id = self.id_file.read_text(encoding="utf-8").strip()
        if self.run_id:
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            new = {"run_name": self.context.name, "tags": dict.fromkeys(self.context.tags, "")}
            self.run_id = self.client.create_run(self._experiment(), **new).info.run_id
            recipe = self.context.recipe.items()
            self._log("params", [Param(key, str(value)) for key, value in recipe], 100)
        self.id_file.write_text(f"{self.run_id}\n", encoding="utf-8")

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "torchtitan")
        found = self.client.get_experiment_by_name(name)
        experiment: str = found.experiment_id if found else self.client.create_experiment(name)
        return experiment

    def write(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        values = [Metric(_allowed(n), float(v), now, step) for n, v in _numbers(metrics).items()]
        self._log("metrics", values, 1000)

    def _log(self, kind: str, values: list[Any], most: int) -> None:
        for start in range(0, len(values), most):  # the most that it takes at once
            self.client.log_batch(self.run_id, **{kind: values[start : start + most]})

    def picture(self, step: int, picture: Tensor) -> None:
        self.client.log_image(self.run_id, pixels(picture), key="validation", step=step)

    def close(self, summary: Metrics) -> None:
        if self.run_id:
            for name, value in summary.items():
                self.client.set_tag(self.run_id, f"summary/{name}", value)
            status = "FAILED" if summary["stopped_by"] else "FINISHED"
            self.client.set_terminated(self.run_id, status)


def rate_key(metrics: Metrics) -> str | None:
    """The key of the speed in a row, if it has one: each task counts something else."""
    return next((key for key in metrics if key == "tps" or key.endswith("_per_second")), None)


def unit_of(rate: str) -> str:
    """The key of the units that a speed counts."""
    return "tokens" if rate == "tps" else rate.removesuffix("_per_second")


def row_line(step: int, total: int, metrics: Metrics) -> str:
    """Format a row for the console in aligned columns, each of which keeps its meaning."""
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    rate = rate_key(metrics)
    if rate is None:
        values = [f"{name.replace('_', ' ')} {_show(v, '.4f')}" for name, v in metrics.items()]
        # A validation is called so once.
        parts += [*values[:1], *(value.removeprefix("validation ") for value in values[1:])]
        return "  ".join(parts)
    mfu, waiting = metrics["mfu"], metrics["data_pct"]
    memory = metrics["memory_gib"]
    places = ".2f" if isinstance(memory, float) and memory < 10 else ".1f"
    parts += [
        f"loss {_show(metrics['loss'], '.4f'):>7}",
        f"norm {_show(metrics['grad_norm'], '#.3g').removesuffix('.'):>5}",
        f"lr {_show(metrics['lr'], '.1e'):>7}",
        f"{_show(metrics[rate], ',.0f'):>6} {RATES.get(rate, f'{unit_of(rate)}/s')}/device",
        *([f"mfu {mfu:>3.0%}"] if isinstance(mfu, float) else []),
        f"{_show(memory, places):>4} GiB",
        f"eta {_about(metrics['eta_s'])}",
    ]
    if isinstance(waiting, float) and waiting >= NOTABLE_WAIT:
        parts.append(f"data {waiting:.0f}%")
    if isinstance(padding := metrics.get("data_padding_pct"), float):
        parts.append(f"padding {padding:.1f}%")
    if metrics["skipped"]:
        parts.append(f"skipped {metrics['skipped']}")
    return "  ".join(parts)


def summary_text(summary: Metrics) -> str:
    """The closing lines of a run."""
    is_short = summary["step"] != summary["total_steps"]
    how = "stopped" if is_short or summary["stopped_by"] in STOPS else "finished"
    if summary["stopped_by"] and summary["stopped_by"] not in STOPS:
        how = "failed"
    rate = rate_key(summary) or "tps"
    unit = unit_of(rate)
    step, steps = summary["step"], summary["steps"]
    assert isinstance(step, int)
    assert isinstance(steps, int)
    # What an earlier launch did is known of some numbers only.
    launch, whole = (" in this launch", " in the whole run") if step > steps else ("", "")
    best = summary["best_validation_loss"]
    since = f"{launch}, which resumed from step {step - steps}" if launch else ""
    lines = [
        f"{how} at step {step} of {summary['total_steps']}",
        f"  steps done            {steps}{since}; {summary['skipped']} skipped",
        f"  {unit:<20}  {_show(summary[unit], ',d')}{whole}",
        f"  time                  {_duration(summary['seconds'])}{launch}",
        f"  {f'mean {unit}/s/device':<20}  {_show(summary[rate], ',.0f')}{launch}",
        f"  final loss            {_show(summary['loss'], '.4f')}",
        *([f"  best validation loss  {best:.4f}{launch}"] if best is not None else []),
        f"  peak memory           {_show(summary['memory_gib'], '.2f')} GiB{launch}",
    ]
    if summary.get("failed_sinks"):
        lines.append(f"  sinks that failed     {summary['failed_sinks']}")
    return "\n".join(lines)


def recipe_text(context: SinkContext) -> str:
    """Name, tags and recipe of a run as Markdown."""
    lines = [f"**{context.name}**", ""]
    if context.tags:
        lines += [f"Tags: {', '.join(context.tags)}", ""]
    lines += ["| key | value |", "|---|---|"]
    for key, value in context.recipe.items():
        shown = str(value).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {key} | {shown} |")
    return "\n".join(lines)


def _show(value: Value, spec: str) -> str:
    if isinstance(value, str):
        return value
    return "n/a" if value is None else format(value, spec)


def _duration(seconds: Value) -> str:
    return str(timedelta(seconds=round(seconds))) if isinstance(seconds, float | int) else "n/a"


def _about(seconds: Value) -> str:
    """A long time in five characters: 1m46s, 2h05m, 3d04h."""
    if not isinstance(seconds, float | int):
        return "n/a"
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 3600:
        return f"{round(seconds) // 60}m{round(seconds) % 60:02}s"
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02}m"
    return f"{hours // 24}d{hours % 24:02}h"


def _numbers(metrics: Metrics) -> dict[str, float | int]:
    return {name: v for name, v in metrics.items() if isinstance(v, float | int)}


def _step_of(line: str) -> int | None:
    """The step of a row; None for a line that is not a whole row."""
    try:
        return int(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return None
