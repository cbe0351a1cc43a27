"""Collects the values of each step on the device, and moves them to the sinks only when due.

A step hands over 0-d tensors without waiting for them. When a row is due (the first step of this
process, every `log_freq`-th step, one that was skipped, the last) one transfer brings all of them
to the host. That transfer also waits for the device, so the clock read after it is honest.

What a row holds, besides every value that was recorded under a name of its own:

| key | value |
|---|---|
| loss, grad_norm, lr | of this step, not a mean since the last row |
| skipped | optimizer steps skipped since the last row |
| samples, data_hash | read so far by all ranks, and their running hash; null: unknown |
| tokens | trained so far, over all ranks, from the first step of the run; or the unit of the task |
| step_time | seconds a step, mean over the steps since the last row, pauses excluded |
| tps | tokens / second / device since the last row, pauses excluded; or the rate of the task |
| mfu | model FLOPs utilization, 0 to 1 (PaLM, arXiv:2204.02311, appendix B); null: peak unknown |
| memory_gib, memory_pct | peak since the last row (CPU: of the process's life), and its share |
| data_pct | percent of the time, pauses excluded, that the device waited for data |
| time/<phase> | seconds a step that went into a phase, mean over ranks; see `torchtitan.timeline` |
| slowest/<phase> | with several ranks: which of them worked longest in it |
| slowest/<phase>_pct | how much longer than the median rank, in percent of the time of a step |
| tokens/<source>, epochs/<source> | read so far from each source of a mixture |
| data_padding_pct, data_cut_pct | shares of `shares`, in percent, of all ranks |
| eta_s | seconds left, from a smoothed time a step, pauses included |
| checkpoint_s, validation_s, ... | seconds of each pause entered since the last row |

Training makes no progress in a pause of the timeline. step_time, memory and data_pct are those of
the worst rank; with several ranks, `rank_step_time` and the like hold this rank's own.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from torchtitan.data.order import hash_text
from torchtitan.device import Device
from torchtitan.logging import logger
from torchtitan.metrics.events import EventLog
from torchtitan.metrics.sinks import Metrics, Sink, Value
from torchtitan.metrics.stragglers import WORK, Straggler, StragglerWatch, busy_seconds
from torchtitan.step import StepStatus
from torchtitan.timeline import PHASES, Spent, Timeline

Number = Tensor | float | int

# Added up between rows; of every other value a row holds that of its step.
COUNTED = ("units", "skipped")

# Weight of the newest row in the smoothed time a step that the ETA is made from.
SMOOTHING = 0.3


class Meter:
    """A context manager around training, which opens and closes the sinks.

    `unit` is the unit that the task counts and `rate` the key of its speed; `units_per_step` is for
    information, as units are counted from the values that `record` is given.
    `flops_per_unit` covers forward and backward, `peak_flops` is the dense peak of one device.
    `data` returns the samples that all ranks have read so far, and this rank's term of their hash,
    a sum modulo 2^64 over all ranks; None if it is unknown.
    `gather` turns a float64 vector (n,) on the device into one row for each rank, (ranks, n); it is
    called on due steps only, and by every rank. None: there is one rank. `shares` returns this
    rank's part and whole of each share, by name, counted since its last call.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        log_freq: int,
        total_steps: int,
        units_per_step: int,
        flops_per_unit: float,
        peak_flops: float | None,
        devices: int,
        device: Device,
        unit: str = "tokens",
        rate: str = "tps",
        rank: int = 0,
        start_step: int = 0,
        start_units: int = 0,
        data: Callable[[], tuple[int, int | None]] | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
        timeline: Timeline | None = None,
        events: EventLog | None = None,
        stragglers: StragglerWatch | None = None,
        shares: Callable[[], Mapping[str, tuple[int, int]]] = dict,
        sources: Callable[[], Mapping[str, float]] = dict,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.sinks, self.unit, self.rate = sinks, unit, rate
        self.log_freq, self.total_steps = log_freq, total_steps
        self.units_per_step, self.flops_per_unit = units_per_step, flops_per_unit
        self.peak_flops, self.devices, self.device = peak_flops, devices, device
        self.rank, self.data, self.gather, self.clock = rank, data, gather, clock
        self.timeline = timeline or Timeline(device, clock)
        self.events = events or EventLog(None, rank)
        self.stragglers = stragglers or StragglerWatch(0)
        self.shares, self.sources = shares, sources
        self._late: list[Straggler] = []
        self.resume(start_step, start_units)

        self._values: dict[str, Number] = {}
        self._counts: dict[str, Number] = dict.fromkeys(COUNTED, 0)
        self._flushed = False
        self._rows = 0
        self._step_seconds = 0.0
        self._training_seconds = 0.0
        self._skipped = 0
        self._last: dict[str, Value] = {}
        self._peak_memory = 0.0
        self._best_validation = math.inf
        self._stopped_by: str | None = "a failed start"
        self._opened: set[int] = set()
        self._failed: dict[int, str] = {}
        self._open = ExitStack()

    def resume(self, step: int, units: int) -> None:
        """Continue after `step`, with `units` trained so far; call it before entering the meter."""
        self.start_step = self._step = self._row_step = step
        self.start_units = self._units = units

    def resize(self, units_per_step: int, flops_per_unit: float) -> None:
        """Continue with steps of other sizes; those before are written as a row."""
        if self._step > self._row_step:
            self._write_row()
        self.units_per_step, self.flops_per_unit = units_per_step, flops_per_unit
        self._rows = 0

    def __enter__(self) -> Self:
        if self.rank == 0:
            logger.info("%s", self._describe())
        self._begin = self.clock()
        with ExitStack() as opened:
            # The console closes last, as it opens last, and tells which of the others failed.
            for sink in reversed(self.sinks):
                opened.callback(self._close, sink)
            for sink in self.sinks:
                self._opened.add(id(sink))
                self._ask(sink, "open", self.start_step)
            self._open = opened.pop_all()
        self._stopped_by = None
        self.device.reset_memory_peak()
        self._begin = self._row_time = self.clock()
        self.timeline.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what is left, unless the run failed: then other ranks may be gone; just close."""
        with self._open:
            if kind is not None:
                self._stopped_by = kind.__name__
            elif self._step > self._row_step:
                self._write_row()
            # Of a run that failed nothing is asked: it may wait for a device that is gone.
            spent = self.timeline.take().items() if kind is None else ()
            pauses = {name: each.wall for name, each in spent if name not in PHASES}
            self.events.write(self._step, "end", stopped_by=self._stopped_by, pauses=pauses)
            self.events.close()

    def record(self, **values: Number) -> None:
        """Take values of the current step, equal on all ranks; 0-d tensors are not waited for."""
        if self._flushed:
            self._flushed = False
            self._values.clear()
        for name, value in values.items():
            value = value.detach() if isinstance(value, Tensor) else value
            if name in COUNTED:
                self._counts[name] = self._counts[name] + value
            else:
                self._values[name] = value

    def flush(self, step: int, **notes: Value) -> None:
        """End a step; write a row if one is due, as it is where there are notes to go into it."""
        assert step > self._step, f"step {step} flushed after step {self._step}"
        first = self._step == self.start_step
        self._step, self._flushed = step, True
        for sink in self.sinks:
            if hasattr(sink, "after_step"):
                self._ask(sink, "after_step", step)
        if first or step % self.log_freq == 0 or step >= self.total_steps or notes:
            self._write_row(notes)

    def end_step(self, status: StepStatus, lr: float) -> None:
        """Take what all ranks know of a step, unless it is void."""
        if status.is_void:
            return
        losses = status.losses
        counted = {"units": status.count, "skipped": status.is_skipped}
        self.record(**losses, grad_norm=status.grad_norm, lr=lr, **counted)
        self.flush(self._step + 1, **status.notes)

    def log(self, step: int, **values: Number | None) -> None:
        """Write values now, as a row of their own; for what is measured rarely, like validation."""
        row: dict[str, Value] = {n: None if v is None else float(v) for n, v in values.items()}
        validation = row.get("validation_loss")
        if isinstance(validation, float):
            self._best_validation = min(self._best_validation, validation)
        self._write(step, row)

    def picture(self, step: int, picture: Tensor) -> None:
        """Hand a picture (3, H, W) in 0..1 to the sinks that show pictures."""
        for sink in self.sinks:
            if hasattr(sink, "picture"):
                self._ask(sink, "picture", step, picture.cpu())

    def event(self, step: int, kind: str, **details: Value) -> None:
        """Write what was decided, as a row of its own; the log says it in words."""
        self._write(step, {"event": kind, **details})
        self.events.write(step, kind, **details)

    def measured(self, step: int, kind: str, **values: Value) -> None:
        """Write what was measured of all ranks together, as a row of its own; no rank's event."""
        self._write(step, {"event": kind, **values})

    def rewind_to(self, step: int, units: int) -> None:
        """Continue after another `step` than the last; the summary counts what this process did."""
        if self._step > self._row_step:
            self._write_row()
        self.start_step -= self._step - step
        self.start_units -= self._units - units
        self._step = self._row_step = step
        self._units = units
        for sink in self.sinks:
            self._ask(sink, "open", step)

    def summary(self) -> Metrics:
        """The run of this process as a whole, as far as it was logged."""
        trained = self._units - self.start_units
        busy, best = self._training_seconds, self._best_validation
        return {
            "step": self._step,
            "total_steps": self.total_steps,
            "steps": self._step - self.start_step,
            "skipped": self._skipped,
            self.unit: self._units,
            "seconds": self.clock() - self._begin,
            self.rate: trained / busy / self.devices if busy else None,
            "loss": self._last.get("loss"),
            "best_validation_loss": best if math.isfinite(best) else None,
            "memory_gib": max(self._peak_memory, self.device.memory_peak()),
            "stopped_by": self._stopped_by,
            "failed_sinks": ", ".join(self._failed.values()) or None,
        }

    def _write_row(self, notes: Metrics | None = None) -> None:
        values = self._transfer()
        now = self.clock()
        steps = self._step - self._row_step
        spent = self.timeline.take()
        pauses = {name: seconds.wall for name, seconds in spent.items() if name not in PHASES}
        wall = now - self._row_time
        step_time = (wall - sum(pauses.values())) / steps
        samples, term = self.data() if self.data else (0, None)
        worst, own, data_hash = self._over_ranks(step_time, spent, steps, term)
        seconds = worst["step_time"] or 0.0

        units, skipped = int(values.pop("units")), int(values.pop("skipped"))
        self._units += units
        rate = units / (seconds * steps) / self.devices if seconds else None
        row: dict[str, Value] = {
            "loss": None,
            "grad_norm": None,
            "lr": None,
            **values,
            **({"samples": samples, "data_hash": data_hash} if self.data else {}),
            **self.sources(),
            self.unit: self._units,
            self.rate: rate,
            "mfu": self._mfu(rate),
            **worst,
            "skipped": skipped,
            "eta_s": self._eta(wall / steps),
            **{f"{name}_s": paused for name, paused in pauses.items()},
            **own,
            **(notes or {}),
        }
        self._training_seconds += seconds * steps
        self._skipped += skipped
        self._peak_memory = max(self._peak_memory, worst["memory_gib"])
        self._last = row
        self._row_time, self._row_step, self._rows = now, self._step, self._rows + 1
        self._counts = dict.fromkeys(COUNTED, 0)
        self.device.reset_memory_peak()
        self._write(self._step, row)
        self.events.write(
            self._step,
            "steps",
            steps=steps,
            wall={name: seconds.wall for name, seconds in spent.items()},
            busy={name: seconds.busy for name, seconds in spent.items()},
            memory_gib=own.get("rank_memory_gib", worst["memory_gib"]),
        )
        for late in self._late:
            self._tell_late(late)

    def _tell_late(self, late: Straggler) -> None:
        if self.rank == 0:
            logger.warning(
                "step %d: rank %d is slow: %s takes %.3g s per step longer than on the median "
                "rank, %.0f%% of a step",
                self._step,
                late.rank,
                late.phase,
                late.seconds,
                late.percent,
            )
        self.event(self._step, "straggler", **late._asdict())

    def _close(self, sink: Sink) -> None:
        if id(sink) in self._opened:
            self._ask(sink, "close", self.summary())

    def _write(self, step: int, row: Metrics) -> None:
        for sink in self.sinks:
            self._ask(sink, "write", step, row)

    def _ask(self, sink: Sink, what: str, *arguments: object) -> None:
        """Have a sink open, write or close; one that fails does not end the run, but is named.

        From then on it is left out, and only asked to close.
        """
        if id(sink) in self._failed and what != "close":
            return
        try:
            getattr(sink, what)(*arguments)
        except Exception as error:
            if id(sink) in self._failed:
                return
            name, why = type(sink).__name__, " ".join(f"{type(error).__name__}: {error}".split())
            self._failed[id(sink)] = f"{name} (at step {self._step}: {why})"
            message = "%s failed to %s at step %d: %s; the run continues without it"
            logger.error(message, name, what, self._step, why, exc_info=error)

    def _transfer(self) -> dict[str, float]:
        """All recorded values on the host, by one transfer, which waits for the device."""
        pending = {**self._values, **self._counts}
        tensors = {name: v for name, v in pending.items() if isinstance(v, Tensor)}
        values = {name: v for name, v in pending.items() if not isinstance(v, Tensor)}
        if not tensors:
            self.device.synchronize()
            return values
        # float64, because a float32 cannot count past 16 million tokens.
        where = self.device.torch_device
        stacked = torch.stack([v.to(where, torch.float64).reshape(()) for v in tensors.values()])
        return values | dict(zip(tensors, stacked.tolist(), strict=True))

    def _over_ranks(
        self, step_time: float, spent: dict[str, Spent], steps: int, term: int | None
    ) -> tuple[dict[str, float], dict[str, float], str | None]:
        """Gather the values that differ between ranks; this rank's own if there are others; the
        sum of their terms of the data's hash.
        """
        memory = self.device.memory_peak()
        in_phases = [spent.get(name, Spent(0.0, 0.0)) for name in PHASES]
        waited = in_phases[PHASES.index("data")].wall / steps
        own = {
            "step_time": step_time,
            "memory_gib": memory,
            "memory_pct": 100 * memory / self.device.memory_capacity(),
            "data_pct": 100 * waited / step_time if step_time else 0.0,
        }
        walls = [each.wall / steps for each in in_phases]
        busy = [busy_seconds(*each) / steps for each in zip(PHASES, in_phases, strict=True)]
        shares = self.shares()
        # Two halves, since float64 has 53 bits; unknown if not a number.
        halves = [math.nan] * 2 if term is None else [float(half) for half in divmod(term, 2**32)]
        table = [[*own.values(), *walls, *busy, *itertools.chain(*shares.values()), *halves]]
        if self.gather is not None:
            where = self.device.torch_device
            # One transfer for all ranks.
            table = self.gather(torch.tensor(table[0], dtype=torch.float64, device=where)).tolist()
        *columns, high, low = zip(*table, strict=True)
        is_known = math.isfinite(sum(high))
        data_hash = hash_text(int(sum(high)) * 2**32 + int(sum(low))) if is_known else None
        worst = dict(zip(own, map(max, columns), strict=False))
        mean = [statistics.fmean(column) for column in columns[len(own) :]]
        worst |= {f"time/{name}": each for name, each in zip(PHASES, mean, strict=False) if each}
        sums = map(sum, columns[len(own) + 2 * len(PHASES) :])
        for name, part, whole in zip(shares, sums, sums, strict=False):
            worst[name] = 100 * part / whole if whole else 0.0
        if self.gather is None:
            return worst, {}, data_hash
        all_worked = dict(zip(PHASES, columns[len(own) + len(PHASES) :], strict=False))
        work = {phase: all_worked[phase] for phase in WORK}
        found = self.stragglers.slowest(work, worst["step_time"])
        self._late = self.stragglers.look(found)
        for one in found:
            worst |= {f"slowest/{one.phase}": one.rank, f"slowest/{one.phase}_pct": one.percent}
        return worst, {f"rank_{name}": value for name, value in own.items()}, data_hash

    def _mfu(self, rate: float | None) -> float | None:
        if rate is None or self.peak_flops is None:
            return None
        return rate * self.flops_per_unit / self.peak_flops

    def _eta(self, step_seconds: float) -> float:
        # The first step of a size warms up and compiles; from the second row on it is forgotten.
        weight = 1.0 if self._rows < 2 else SMOOTHING
        self._step_seconds += weight * (step_seconds - self._step_seconds)
        return self._step_seconds * max(self.total_steps - self._step, 0)

    def _describe(self) -> str:
        one = self.unit.removesuffix("s")
        formula = f"{self.unit}/s/device x {self.flops_per_unit:.4g} FLOPs/{one} / dense peak"
        what = (
            f"{self.units_per_step:,} {self.unit} per step on {self.devices} x {self.device.name}"
        )
        if self.peak_flops is None and self.device.type == "cpu":
            return what
        if self.peak_flops is None:
            return f"{what}; MFU = {formula}: null, as this device's peak is unknown"
        return f"{what}; MFU = {formula}, {self.peak_flops:.4g} FLOP/s"
