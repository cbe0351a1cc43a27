"""Variants of a study as their finished runs have left them, for the pages that are made of them.

The loss of a run is the mean of its last 30 steps.
"""

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.job import JobConfig
from torchtitan.tools.compare.gather import Candidate, compare_curves, sent_bytes
from torchtitan.tools.compare.runs import MeasuredRun, is_done, spread
from torchtitan.tools.compare.study import Ready, Study, prepare, read_study, tasks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from svg import INK, LINE, MUTED, Picture  # noqa: E402

LAST = 30
"""Steps whose mean is the loss of a run."""
SEEDS = (1, 2)
"""Seeds of further runs, besides that of the recipe."""


class Variant:
    """Its finished runs, by seed."""

    def __init__(
        self, name: str, job: JobConfig, ranks: int, runs: Mapping[int, MeasuredRun]
    ) -> None:
        self.name, self.job, self.ranks, self.runs = name, job, ranks, dict(sorted(runs.items()))

    @property
    def first(self) -> MeasuredRun:
        return next(iter(self.runs.values()))

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that rank 0 sends in a step, by axis."""
        return sent_bytes(Candidate(self.name, self.job, self.ranks, "ran", (), (self.first,)))

    @property
    def losses(self) -> dict[int, float]:
        """By seed."""
        curves = {seed: run.curve("loss").values[-LAST:] for seed, run in self.runs.items()}
        return {seed: statistics.fmean(v or 0.0 for v in values) for seed, values in curves.items()}

    @property
    def milliseconds(self) -> str:
        """Of a step: median and quartiles, of all runs."""
        of_all = spread([1000 * s for run in self.runs.values() for s in run.step_seconds])
        assert of_all is not None
        return f"{of_all.median:,.0f} ({of_all.quartile_1:,.0f} to {of_all.quartile_3:,.0f})"

    def parity(self, base: "Variant") -> str:
        """Whether the first steps are those of the baseline, and how far the loss is off."""
        ours, theirs = self.first, base.first
        curves = [run.curve(key) for key in ("loss", "grad_norm") for run in (ours, theirs)]
        found = compare_curves(*curves, (self.job, base.job))
        off = f": {found.loss.largest:.0e} at step {found.loss.step}" if found.loss else ""
        return f"{found.verdict}{off}"


def studies(path: Path) -> list[Study]:
    """A study, and the same from each further seed, which has a folder of its own."""
    first = read_study(path)
    others = (
        read_study(path, [f"--debug.seed={seed}"], output=f"{first.output}_seed_{seed}")
        for seed in SEEDS
    )
    return [first, *others]


def finished(studies: Sequence[Study]) -> dict[str, Variant]:
    """The variants that have runs."""
    found: dict[str, dict[int, MeasuredRun]] = {}
    ready: dict[str, Ready] = {}
    for study in studies:
        warmup = study.conditions.warmup_steps
        last = warmup + study.conditions.steps
        for task in tasks(study, prepare(study)):
            if is_done(task):
                seed = task.job.debug.seed
                run = MeasuredRun(task.folder, task.round, seed, warmup, last)
                found.setdefault(task.ready.name, {}).setdefault(seed, run)
                ready[task.ready.name] = task.ready
    return {
        name: Variant(name, ready[name].job, ready[name].plan.ranks, runs)
        for name, runs in found.items()
    }


def model_size(job: JobConfig, prefix: str = "") -> int:
    """Parameters of those names that begin so."""
    from torchtitan.models import MODELS
    from torchtitan.models.spec import build_empty

    model = build_empty(MODELS[job.model.name].build, job.model_args(), job.training.seq_len)
    return sum(p.numel() for name, p in model.named_parameters() if name.startswith(prefix))


def conditions(base: Variant) -> dict[str, Any]:
    """Return what all pages say of the machine, the model and the baseline."""
    environment = base.first.history.environment
    steps, tokens = base.first.all[-1]["step"], base.first.all[0]["tokens"]
    return {
        **{key: environment.get(key) for key in ("device", "torch", "python")},
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "last": LAST,
        "base": base.name,
        "steps": steps,
        "tokens": tokens,
        "all_tokens": steps * tokens,
        "parameters": model_size(base.job),
        "outside": 1 - model_size(base.job, "layers.") / model_size(base.job),
        "seeds": len(base.losses),
        "chance": max(base.losses.values()) - min(base.losses.values()),
    }


def draw(variants: Sequence[Variant], what: str) -> Picture:
    """A row for each variant, named as `what`, with a dot for each seed and a bar at their mean."""
    left, right, row = max(140, *(12 + 7 * len(each.name) for each in variants)), 600, 26
    bottom = 30 + row * len(variants)
    about = f"A row for each {what}; a dot for each seed at its loss, a bar at the mean."
    picture = Picture("Loss at the end, by seed", about, 640, bottom + 48)
    every = [loss for each in variants for loss in each.losses.values()]
    apart = (max(every) - min(every)) / 10 or 0.1
    low, high = min(every) - apart, max(every) + apart

    def x(loss: float) -> float:
        return left + (right - left) * (loss - low) / (high - low)

    for number in range(5):
        loss = low + number * (high - low) / 4
        picture.line([(x(loss), 20), (x(loss), bottom)], LINE, width=0.5)
        picture.text(x(loss), bottom + 18, f"{loss:.2f}", "middle")
    label = f"mean loss of the last {LAST} steps"
    picture.text((left + right) / 2, bottom + 38, label, "middle", MUTED)
    for number, each in enumerate(variants):
        at = 40 + row * number
        picture.text(left - 12, at + 4, each.name, "end")
        mean = statistics.fmean(each.losses.values())
        picture.line([(x(mean), at - 9), (x(mean), at + 9)], INK, width=2)
        for loss in each.losses.values():
            picture.rect(x(loss) - 3, at - 3, 6, 6, "#1f6feb")
    return picture
