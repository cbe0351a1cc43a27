"""The layouts that a search found, as JSON and as text; their runs, and the best as a recipe."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan.checks import ELSEWHERE, load_job
from torchtitan.config import RecipeError
from torchtitan.device import DeviceType
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.layouts import BATCH, SHARDS, Changes, own_layout, with_changes
from torchtitan.plan.plan import Plan
from torchtitan.plan.search import SearchResult, fastest, planned_recipe, search
from torchtitan.tools.compare import compare_recipes, read
from torchtitan.tools.compare.results import Variant

Json = dict[str, Any]
Measured = Mapping[str, Any]
SECONDS = 45.0
"""Time of a search by default."""
SHOWN = 5
"""Number of layouts that are listed."""
WARMUP, STEPS, ROUNDS = 3, 5, 2
"""Steps of a run before those measured, steps measured, and runs of each layout."""


def require_devices(hardware: Hardware, ranks: int) -> None:
    """Require that this machine can run `ranks` on `hardware`.

    Raises:
        RecipeError: naming what is here.
    """
    other = "leave --time out, or run it there"
    if hardware.device_type == "cpu":
        if ranks > hardware.ranks_per_node:
            wanted = f"{hardware.ranks_per_node:,} processes of one machine"
            raise RecipeError([f"--time: got {ranks:,} ranks; wanted at most {wanted}; {other}"])
        return
    here = torch.cuda.device_count()
    if here < ranks:
        devices = "no CUDA device" if not here else f"{here:,} CUDA device{'s' * (here > 1)}"
        message = f"--time: {ranks:,} ranks on {hardware.name} need as many devices"
        raise RecipeError([f"{message}; this machine has {devices}; {other}"])
    name = torch.cuda.get_device_name(0)
    if hardware.device and name != hardware.device:
        message = f"--time: {hardware.name} is {hardware.device}; this machine has {name}"
        raise RecipeError([f"{message}; {other}, or plan for it with --calibrate"])


def time_layouts(folder: Path, recipes: Sequence[str], ranks: int) -> list[Measured]:
    """Run recipes in turns, and return the measured numbers of each.

    Args:
        folder: for the recipes, the runs and the report of the comparison. Runs of the same recipes
            that are there already are used.
        recipes: their text; what they extend is relative to `folder`.
    """
    paths = [folder / f"layout_{number}.toml" for number in range(1, len(recipes) + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, recipes, strict=True):
        path.write_text(text, encoding="utf-8")
    conditions = {"rounds": ROUNDS, "warmup_steps": WARMUP, "steps": STEPS, "trace": False}
    study = read(paths, [], [], ranks=ranks, output=str(folder), **conditions)
    return [measured(each) for each in compare_recipes(study).variants]


def measured(variant: Variant) -> Measured:
    """Return the numbers of a variant that ran, or the reason why it did not."""
    if variant.step_s is None or variant.tps is None:
        return {"status": variant.status, "reasons": [*variant.reasons]}
    step = variant.step_s
    return {
        "status": variant.status,
        "seconds_per_step": {"value": step.median, "low": step.least, "high": step.most},
        "tokens_per_second_per_device": variant.tps.median,
        "memory_gib": variant.memory_gib,
    }


def fastest_run(runs: Sequence[Measured]) -> int:
    """Return the index of the fastest run; 0 if none ran."""
    rates = [run.get("tokens_per_second_per_device", 0.0) for run in runs]
    return rates.index(max(rates))


def run_text(run: Measured) -> str:
    """Describe a timed run in a line."""
    if "seconds_per_step" not in run:
        return f"timed: {run['status']}: {'; '.join(run['reasons'])}"
    step = run["seconds_per_step"]
    return (
        f"timed: {run['tokens_per_second_per_device']:,.0f} tokens/s/device, "
        f"{step['value']:.3g} s per step ({step['low']:.3g} to {step['high']:.3g})"
    )


def search_layouts(
    recipe: Path,
    planned: Plan,
    device_type: DeviceType,
    output: Path,
    *,
    seconds: float = SECONDS,
    timed: int = 0,
) -> Json:
    """Search the layouts of a planned recipe.

    Args:
        output: file for the best layout, which `write_best` writes.
        seconds: time of the search; it plans a few layouts at least.
        timed: number of the best layouts to run; then the best is the fastest of these.

    Raises:
        RecipeError: if no layout fits.
    """
    job, ranks, hardware = planned.job, planned.ranks, planned.hardware
    assert hardware is not None, "the command asked for it"
    found = search(job, planned, hardware, device_type=device_type, seconds=seconds)
    if not found.layouts:
        raise RecipeError([f"--search: none of {described(found)}; {_fix(found)}"])
    rows, best = fastest(found, max(SHOWN, timed)), 0
    if timed:
        folder = output.parent / f"{output.stem}_timed"
        taken = [row["changes"] for row in rows[:timed]]
        recipes = [_recipe(recipe, planned, device_type, each, folder) for each in taken]
        runs = time_layouts(folder, recipes, ranks)
        for row, run in zip(rows, runs, strict=False):
            row["measured"] = run
        best = fastest_run(runs)
    return {
        "recipe": str(output),
        "best": best,
        "is_own": rows[best]["changes"] == own_layout(job, ranks),
        "enumerated": found.enumerated,
        "refused": found.refused,
        "without_room": found.without_room,
        "planned": found.planned,
        "failed": found.failed,
        "is_complete": found.is_complete,
        "seconds": found.seconds,
        "summary": f"the best of {described(found)}",
        "title": found.best,
        "layouts": rows,
    }


def write_best(found: Json, recipe: Path, planned: Plan, device_type: DeviceType) -> None:
    """Write the best layout of a search as a recipe that extends the searched one."""
    output, best = Path(found["recipe"]), found["layouts"][found["best"]]
    title = found["title"] if not found["best"] else f"in runs the fastest of {found['title']}"
    text = _recipe(recipe, planned, device_type, best["changes"], output.parent, title)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")


def _recipe(
    recipe: Path,
    planned: Plan,
    device_type: DeviceType,
    changes: Changes,
    folder: Path,
    title: str = "",
) -> str:
    """Return a layout as a recipe in a folder."""
    given = load_job(recipe, (), None, device_type, exempt=(*ELSEWHERE, "job.hardware")).config
    extends = Path(os.path.relpath(recipe, folder)).as_posix()
    title = title[:1].upper() + title[1:]
    return planned_recipe(with_changes(planned.job, changes), given, extends, title)


def described(found: SearchResult) -> str:
    """Describe in words how much was searched."""
    failed = sum(found.failed.values())
    text = (
        f"{found.planned:,} planned of {found.enumerated:,} layouts in {found.seconds:.0f} s; "
        f"{len(found.layouts)} of them fit, {found.without_room:,} others need far more memory"
    )
    text += f"; {failed} could not be planned" if failed else ""
    if found.is_complete:
        return f"{text}; the others are expected to be slower, or not to fit"
    return f"{text}; a longer search (--seconds) plans more"


def _fix(found: SearchResult) -> str:
    if found.too_large:
        return "use more ranks, or a device with more memory"
    reasons = " or ".join(found.failed)
    return f"the plans failed: {reasons}" if reasons else "use more ranks"


def search_text(found: Json) -> Iterator[str]:
    """Yield the lines of a search, given its JSON object."""
    yield from ("", f"search: {found['summary']}")
    for place, layout in enumerate(found["layouts"], 1):
        mfu = "" if layout["mfu"] is None else f", MFU {layout['mfu']:.1%}"
        size = layout["reserved_gib"]["value"]
        speed = layout["tokens_per_second_per_device"]
        yield f"{place}. {speed:,.0f} tokens/s/device{mfu}, {size:.1f} GiB"
        yield f"   {words(layout['changes'])}"
        if layout["reason"]:
            yield f"   {layout['reason']}"
        if run := layout.get("measured"):
            yield f"   {run_text(run)}"
    which = "layout 1" if not found["best"] else f"layout {found['best'] + 1}, the best in runs"
    own = ", which the recipe has already" if found["is_own"] else ""
    yield f"recipe: {found['recipe']}: {which}{own}"


def words(changes: Mapping[str, Any]) -> str:
    """Describe a layout in short; degrees of 1 are left out."""
    shown = (
        (key.partition(".")[2].removesuffix("_degree"), value)
        for key, value in changes.items()
        if key not in (BATCH, SHARDS) and not (key.endswith("_degree") and value == 1)
    )
    return ", ".join(f"{name} {value}" for name, value in shown)
