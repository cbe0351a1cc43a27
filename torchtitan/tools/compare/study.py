"""The variants to compare: a study in a file, recipes one by one, or one recipe varied.

A study is TOML. Its own keys say how to compare; `[common]` holds settings of all its recipes, and
each `[[variants]]` a name and the settings in which it differs, written as in a recipe:

    recipe = "../llama3_8b.toml"
    ranks = 8

    [[variants]]
    name = "FSDP"

    [[variants]]
    name = "TP 2"
    parallelism.tensor_parallel_degree = 2

Each setting keeps its line, so that mistakes in a variant are reported as of any recipe. A setting
that does not exist refuses the whole study. A variant whose settings cannot work together, or not
on this machine, is reported, and the others run.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from torchtitan.checks import load_job
from torchtitan.checks.limits import problems_of_memory
from torchtitan.config import (
    CannotRun,
    Config,
    KeyPath,
    Problem,
    RecipeError,
    Setting,
    allowed_names,
    is_array,
    located,
    read_file,
    read_flags,
    show,
    validate_all,
)
from torchtitan.device import pick
from torchtitan.inputs import problems_of_task
from torchtitan.job import JobConfig
from torchtitan.provenance import to_toml, versions

Settings = dict[KeyPath, Setting]


class Conditions(Config):
    """The keys of a study, which set the conditions of the comparison."""

    title: str = ""
    """Heading of the report (default: the name of the file)."""
    description: str = ""
    """Question that the study answers."""
    recipe: str | None = None
    """Recipe of all variants, relative to this file."""
    ranks: int | None = Field(None, ge=1)
    """Number of ranks of each run (default: the minimum of its recipe)."""
    baseline: str | None = None
    """Name of the variant to compare with (default: the first)."""
    rounds: int = Field(3, ge=1)
    """Number of runs of each variant."""
    warmup_steps: int = Field(5, ge=1)
    """Number of steps at the start of a run that are not measured."""
    steps: int = Field(20, ge=2)
    """Number of measured steps after the warmup."""
    trace: bool = True
    """Trace one more step, which is not measured, for the time spent communicating."""
    output: str | None = None
    """Folder of runs and report (default: outputs/studies/ and the file's name)."""


SEEDS = "compare the study again with another seed: --debug.seed 1 --output FOLDER"
MACHINES = "start runs over several machines yourself, and give compare their folders"
REMOVED = {"seeds": SEEDS, "seeds_of": SEEDS, "launcher": MACHINES, "device": MACHINES}
"""Keys of studies of earlier versions, with what replaces them."""


class VariantKeys(Config):
    """The keys of a variant that are not settings of its recipe."""

    name: str = ""
    """Name in the report."""
    recipe: str | None = None
    """Recipe to use instead of the study's."""
    ranks: int | None = Field(None, ge=1)
    """Number of processes to use instead of the study's."""


@dataclass(frozen=True)
class VariantPlan:
    """A variant as requested: a recipe, and the settings that override it."""

    name: str
    recipe: Path | None
    ranks: int
    """Number of ranks; 0: as few as the recipe allows."""
    over: tuple[Settings, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """The variants to compare, and the conditions."""

    title: str
    conditions: Conditions
    plans: tuple[VariantPlan, ...]
    output: Path
    place: str = ""
    """Path of the study's file, if there is one."""
    baseline: str = ""


def is_study(path: Path) -> bool:
    """Whether a file is a study, which has variants, and not a recipe.

    Raises:
        RecipeError: if it cannot be read.
    """
    problems: list[str] = []
    found = path.is_file() and ("variants",) in read_file(path, problems)
    if problems:
        raise RecipeError(problems)
    return found


def read_study(path: Path, flags: Sequence[str] = (), **changes: Any) -> Study:
    """Read a study; `changes` override its conditions, `flags` the settings of all variants.

    Raises:
        RecipeError: with all mistakes in its own keys.
    """
    problems: list[str] = []
    settings = read_file(path, problems)
    if problems:
        raise RecipeError(problems)
    known = "; and [common], [[variants]]"
    own = {key: value for key, value in settings.items() if key[0] not in ("common", "variants")}
    written, faults, _ = validate_all(Conditions, own)
    for key, text in faults.items():
        name = ".".join(key)
        if name in REMOVED:
            text = f"this key was removed; {REMOVED[name]}"
        elif text.startswith("unknown"):
            text += known
        problems.append(f"{own[key].origin}: {name}: {text}")
    conditions = _changed(written, changes)
    common, plans = _below(settings, ("common",)), []
    variants = settings.get(("variants",), Setting([], "")).value
    for number in map(str, range(len(variants) if isinstance(variants, list) else 0)):
        section = _below(settings, ("variants", number))
        keys: Settings = {
            (key,): section.pop((key,)) for key in VariantKeys.model_fields if (key,) in section
        }
        if ("name",) not in keys:
            origin = settings["variants", number].origin
            problems.append(f"{origin}: variants.{number}: it has no name")
        variant, faults, _ = validate_all(VariantKeys, keys)
        problems += [
            f"{keys[key].origin}: variants.{number}.{key[0]}: {text}"
            for key, text in faults.items()
        ]
        recipe = variant.recipe or conditions.recipe
        place = path.parent / recipe if recipe else None
        ranks = variant.ranks or conditions.ranks or 0
        plans.append(VariantPlan(variant.name, place, ranks, (common, section), tuple(flags)))
    if problems:
        raise RecipeError(problems)
    origin = settings.get(("baseline",), Setting("", "")).origin
    return _study(path.stem, conditions, plans, str(path), origin)


def make_study(
    paths: Sequence[Path], variations: Sequence[str], flags: Sequence[str], **changes: Any
) -> Study:
    """Make a study of recipes as they are, or varied: `parallelism.tensor_parallel_degree=1,2`.

    Several variations are combined in all ways.

    Raises:
        RecipeError: if there is nothing to compare, or a variation does not have that form.
    """
    if not paths and not variations:
        wanted = "a study, recipes, a recipe and --vary, or folders of runs"
        raise RecipeError([f"compare: got nothing to compare; wanted {wanted}"])
    conditions = _changed(Conditions(), changes)
    plans = []
    several: list[Path | None] = [*paths] or [None]
    combinations = list(itertools.product(*map(_choices, variations)))
    for path, choices in itertools.product(several, combinations):
        names = [name for name, _ in choices]
        if path is not None and (len(paths) > 1 or not names):
            names.insert(0, path.stem)
        all_flags = (*flags, *(flag for _, flag in choices))
        plans.append(VariantPlan(", ".join(names), path, conditions.ranks or 0, (), all_flags))
    stem = "_".join([path.stem for path in paths] or ["defaults"])
    if variations:
        keys = (variation.partition("=")[0].rpartition(".")[2] for variation in variations)
        stem += "_by_" + "_".join(keys)
    return _study(stem, conditions, plans, "", "--baseline")


def _choices(variation: str) -> Iterator[tuple[str, str]]:
    """Split `section.key=a,b` into the name of each value and the flag that sets it."""
    key, equals, values = variation.partition("=")
    try:
        given = json.loads(values) if is_array(values) else values.split(",")
    except ValueError as error:
        raise RecipeError([f"--vary: got {variation}; wanted a JSON array: {error}"]) from None
    if not equals or "." not in key or "" in given:
        raise RecipeError([f"--vary: got {variation}; wanted section.key=value,value"])
    for value in (each if isinstance(each, str) else json.dumps(each) for each in given):
        yield f"{key.rpartition('.')[2]} = {value}", f"--{key}={value}"


def _changed(conditions: Conditions, changes: Mapping[str, Any]) -> Conditions:
    given = {name: value for name, value in changes.items() if value is not None}
    return Conditions.model_validate(conditions.model_dump() | given)


def _study(
    stem: str, conditions: Conditions, plans: list[VariantPlan], place: str, baseline_at: str
) -> Study:
    """Make a study, whose variants must have different names and folders."""
    names = [plan.name for plan in plans]
    where = place or "compare"
    problems = []
    if len(plans) < 2:
        got = "one variant" if plans else "no variants"
        problems.append(f"{where}: got {got}; wanted two or more to compare")
    taken: dict[str, str] = {}
    for name in names:
        if not slug(name):
            problems.append(f"{where}: a variant is called {show(name)}; wanted letters or digits")
        elif other := taken.get(slug(name)):
            both = f"{show(other)} and {show(name)}"
            problems.append(f"{where}: variants {both} would share a folder")
        taken[slug(name)] = name
    baseline = conditions.baseline or (names[0] if names else "")
    if names and baseline not in names:
        got = f"got {show(baseline)}; {allowed_names(baseline, names)}"
        problems.append(f"{baseline_at or where}: baseline: {got}")
    if problems:
        raise RecipeError(problems)
    return Study(
        title=conditions.title or stem,
        conditions=conditions,
        plans=tuple(plans),
        output=Path(conditions.output or f"outputs/studies/{stem}").expanduser(),
        place=place,
        baseline=baseline,
    )


def slug(name: str) -> str:
    """Turn a name into that of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _below(settings: Settings, section: KeyPath) -> Settings:
    """The settings in a section, by their paths in it."""
    depth = len(section)
    return {
        path[depth:]: setting
        for path, setting in settings.items()
        if path[:depth] == section and len(path) > depth
    }


def setting_of(words: Mapping[str, Any], origin: str) -> Settings:
    """Make settings from dotted keys, all with the same origin."""
    settings: Settings = {}
    for key, value in words.items():
        path = tuple(key.split("."))
        for depth in range(1, len(path)):
            settings.setdefault(path[:depth], Setting({}, origin))
        settings[path] = Setting(value, origin)
    return settings


OPTIONS = {"training.steps": "--steps", "job.dump_folder": "--output"}
"""Options of `torchtitan compare`, and keys of a study, that set a key for all variants."""


def refuse_conditions(plans: Sequence[VariantPlan], keys: Sequence[str]) -> None:
    """Raise if a variant sets a key that the comparison sets for all.

    Raises:
        RecipeError: with a line for each.
    """
    lines = []
    for plan in plans:
        for settings in (*plan.over, read_flags(plan.flags, JobConfig, {})[0]):
            for path, setting in settings.items():
                key = ".".join(path)
                if key in keys:
                    use = f"; use {OPTIONS[key]}" if key in OPTIONS else ""
                    lines.append(
                        f"{located(setting.origin, key)}: got {show(setting.value)}; "
                        f"the comparison sets it, alike for all variants{use}"
                    )
    if lines:
        raise RecipeError(lines)


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
    key: str
    """Digest of everything that its numbers may depend on."""


def prepare(study: Study, *, is_here: bool = True) -> list[Ready]:
    """Check every variant, for this machine or else for CUDA devices of others.

    Raises:
        RecipeError: with the mistakes of all variants, except settings that do not work together.
    """
    decided = decisions(study)
    refuse_conditions(study.plans, [*decided, "job.dump_folder"])
    found, wrong, notices = [], list[str](), list[str]()
    for plan in study.plans:
        try:
            found.append(_check(study, plan, decided, is_here))
        except RecipeError as error:
            wrong += error.lines
            notices += error.notices
    if wrong:
        raise RecipeError(wrong, dict.fromkeys(notices))
    return found


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


def _check(study: Study, plan: VariantPlan, decided: dict[str, Any], is_here: bool) -> Ready:
    kind = pick().type if is_here else "cuda"
    over: list[Settings] = [setting_of(OFF, "compare"), *plan.over, setting_of(decided, "compare")]
    load = partial(load_job, plan.recipe, plan.flags, device_type=kind, is_here=is_here, over=over)
    try:
        if not plan.ranks:
            plan = replace(plan, ranks=load(None).config.parallelism.least_ranks)
        recipe = load(plan.ranks, local_ranks=plan.ranks if is_here else None)
        if is_here:
            recipe.refuse(problems_of_memory(recipe.config, plan.ranks, plan.ranks, kind))
        recipe.refuse(problems_of_task(recipe.config))
        if is_here:
            recipe.refuse(_too_many(plan))
    except CannotRun as error:
        plan = replace(plan, ranks=plan.ranks or error.config.parallelism.least_ranks)
        return Ready(plan, error.config, tuple(error.lines))
    return Ready(plan, recipe.config, ())


def _too_many(plan: VariantPlan) -> Iterator[Problem]:
    """Refuse more ranks than this machine has devices."""
    devices = torch.cuda.device_count()
    if pick().type == "cuda" and plan.ranks > devices:
        message = f"{plan.ranks} ranks need as many devices, and this machine has {devices}"
        advice = "start each run over several machines by itself, and compare their folders"
        yield Problem("parallelism", f"{message}; {advice}")


def tasks(study: Study, variants: list[Ready]) -> list[PlannedRun]:
    """All runs in the order in which they are launched.

    Every other round is in reverse order, so that a machine that warms up or slows down favors no
    variant.
    """
    runnable = [ready for ready in variants if not ready.problems]
    found = []
    for number in range(1, study.conditions.rounds + 1):
        for ready in runnable[:: 1 if number % 2 else -1]:
            folder = study.output / "runs" / slug(ready.name) / f"round-{number}"
            section = ready.job.job.model_copy(update={"dump_folder": str(folder)})
            job = ready.job.model_copy(update={"job": section})
            found.append(PlannedRun(ready, job, folder, number, _key(ready, job)))
    return found


def _key(ready: Ready, job: JobConfig) -> str:
    about = {
        "recipe": {k: v for k, v in job.flat().items() if not k.startswith("job.")},
        "ranks": ready.plan.ranks,
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
