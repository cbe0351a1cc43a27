"""Turns a study into runs that can be launched, after checking each variant.

A setting that does not exist refuses the whole study. A variant whose settings cannot work
together, or not on this machine, is reported, and the others run.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchtitan.checks import load_job
from torchtitan.checks.memory import problems_of_memory
from torchtitan.config import CannotRun, Problem, RecipeError
from torchtitan.device import pick
from torchtitan.inputs import problems_of_task
from torchtitan.job import JobConfig
from torchtitan.provenance import to_toml, versions
from torchtitan.tools.compare.study import (
    Settings,
    Study,
    VariantPlan,
    refuse_conditions,
    setting_of,
    slug,
)

TRACED = 2
"""Steps for a trace at the end of a run: one to warm up the profiler, and one that is kept."""

OFF = {"checkpoint.enable": False, "validation.enable": False}
"""Defaults of a study, which should not fill a disk; a variant or `[common]` may override them."""


@dataclass(frozen=True)
class Ready:
    """A variant that was checked."""

    plan: VariantPlan
    job: JobConfig
    problems: tuple[str, ...]
    """Reasons why it cannot run."""

    @property
    def name(self) -> str:
        return self.plan.name


@dataclass(frozen=True)
class PlannedRun:
    """One run of a variant."""

    ready: Ready
    job: JobConfig
    folder: Path
    round: int
    seed: int
    key: str
    """Digest of everything that its numbers may depend on."""


def prepare(study: Study) -> list[Ready]:
    """Check every variant.

    Raises:
        RecipeError: with the mistakes of all variants, except settings that do not work together.
    """
    launcher(study)
    decided = decisions(study)
    refuse_conditions(study.plans, [*decided, "job.dump_folder", "debug.seed"])
    found, wrong, notices = [], list[str](), list[str]()
    for plan in study.plans:
        try:
            found.append(_check(study, plan, decided))
        except RecipeError as error:
            wrong += error.lines
            notices += error.notices
    if wrong:
        raise RecipeError(wrong, dict.fromkeys(notices))
    return found


def launcher(study: Study) -> str:
    """The command that starts a run, with environment variables substituted.

    Raises:
        RecipeError: if one of them is not set.
    """
    command = os.path.expandvars(study.conditions.launcher)
    if missing := re.findall(r"\$\{?\w+\}?", command):
        where = f"{study.place}: " if study.place else ""
        names = " and ".join(missing)
        raise RecipeError(
            [f"{where}launcher: the environment has no {names}; it is that of {command!r}"]
        )
    return command


def decisions(study: Study) -> dict[str, Any]:
    """The settings that the comparison fixes for all variants, by dotted key."""
    conditions = study.conditions
    steps = conditions.warmup_steps + conditions.steps
    decided: dict[str, Any] = {
        "training.steps": steps,
        "metrics.log_freq": 1,
        "metrics.save_events": True,
        "profiling.enable_profiling": conditions.trace,
    }
    if conditions.trace:
        decided |= {
            "training.steps": steps + TRACED,
            "profiling.profile_freq": steps + TRACED,
            "profiling.profiler_warmup": TRACED - 1,
            "profiling.profiler_active": 1,
        }
    return decided


def _check(study: Study, plan: VariantPlan, decided: dict[str, Any]) -> Ready:
    own = bool(study.conditions.launcher)
    kind = study.conditions.device or pick().type
    over: list[Settings] = [setting_of(OFF, "compare"), *plan.over, setting_of(decided, "compare")]
    try:
        if not plan.ranks:
            draft = load_job(plan.recipe, plan.flags, None, kind, is_here=not own, over=over)
            plan = replace(plan, ranks=draft.config.parallelism.least_ranks)
        local = None if own else plan.ranks
        recipe = load_job(
            *(plan.recipe, plan.flags, plan.ranks, kind),
            is_here=not own,
            local_ranks=local,
            over=over,
        )
        if not own:
            recipe.refuse(problems_of_memory(recipe.config, plan.ranks, plan.ranks, kind))
        recipe.refuse(problems_of_task(recipe.config))
        if not own:
            recipe.refuse(_too_many(plan))
    except CannotRun as error:
        plan = replace(plan, ranks=plan.ranks or error.config.parallelism.least_ranks)
        return Ready(plan, error.config, tuple(error.lines))
    return Ready(plan, recipe.config, ())


def _too_many(plan: VariantPlan) -> Iterator[Problem]:
    """Refuse more ranks than this machine has devices."""
    ranks = plan.ranks
    if pick().type == "cuda" and ranks > torch.cuda.device_count():
        message = f"{ranks} ranks need as many devices, and this machine has "
        yield Problem(
            "parallelism",
            f"{message}{torch.cuda.device_count()}; a study may have a launcher of its own",
        )


def tasks(study: Study, variants: list[Ready]) -> list[PlannedRun]:
    """All runs in the order in which they are launched.

    Every other round is in reverse order, so that a machine that warms up or slows down favors no
    variant.
    """
    runnable = [ready for ready in variants if not ready.problems]
    found = []
    for number in range(1, study.conditions.rounds + 1):
        for ready in runnable[:: 1 if number % 2 else -1]:
            found.append(_task(study, ready, number, None))
        if number == 1:
            with_seeds = (study.baseline, *study.conditions.seeds_of)
            chosen = [ready for ready in runnable if ready.name in with_seeds]
            for seed in study.conditions.seeds:
                found += [_task(study, ready, 1, seed) for ready in chosen]
    return found


def _task(study: Study, ready: Ready, number: int, seed: int | None) -> PlannedRun:
    job = ready.job
    folder = study.output / "runs" / slug(ready.name) / f"round-{number}"
    if seed is not None:
        folder = folder.with_name(f"seed-{seed}")
        job = job.model_copy(update={"debug": job.debug.model_copy(update={"seed": seed})})
    section = job.job.model_copy(update={"dump_folder": str(folder)})
    job = job.model_copy(update={"job": section})
    return PlannedRun(ready, job, folder, number, job.debug.seed, _key(study, ready, job))


def _key(study: Study, ready: Ready, job: JobConfig) -> str:
    about = {
        "recipe": {k: v for k, v in job.flat().items() if not k.startswith("job.")},
        "ranks": ready.plan.ranks,
        "launcher": launcher(study),
        "versions": versions(),
        "device": pick().name,
        "cores": os.cpu_count(),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]


def write_recipe(task: PlannedRun) -> Path:
    """Write the recipe of a run next to its folder."""
    path = task.folder.with_name(f"{task.folder.name}.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(task.job), encoding="utf-8")
    return path
