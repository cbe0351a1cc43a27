"""The layouts that a search found, as JSON and as text, and the best as a recipe."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.checks import ELSEWHERE, load_job
from torchtitan.config import RecipeError
from torchtitan.device import DeviceType
from torchtitan.estimate.layouts import BATCH, SHARDS, Changes, own_layout, with_changes
from torchtitan.estimate.plan import Plan
from torchtitan.estimate.search import SearchResult, fastest, planned_recipe, search
from torchtitan.tools.plan.timing import fastest_run, run_text, time_layouts

Json = dict[str, Any]
FEW_RANKS = 1024
SECONDS, SECONDS_OF_MANY = 45.0, 240.0
"""Time of a search on up to `FEW_RANKS`, and on more."""
SHOWN = 5
"""Number of layouts that are listed."""


def search_layouts(
    recipe: Path,
    planned: Plan,
    device_type: DeviceType,
    output: Path,
    *,
    spent: float = 0.0,
    timed: int = 0,
) -> Json:
    """Search the layouts of a planned recipe, and write the best as one that extends it.

    Args:
        spent: seconds that the plan took, which are part of the time of a search.
        timed: number of the fastest layouts to run; then the best is the fastest of these.

    Raises:
        RecipeError: if no layout fits.
    """
    job, ranks, hardware = planned.job, planned.ranks, planned.hardware
    assert hardware is not None, "the command asked for it"
    limit = SECONDS if ranks <= FEW_RANKS else SECONDS_OF_MANY
    left = max(limit - spent, limit / 2)
    found = search(job, planned, hardware, device_type=device_type, seconds=left)
    if not found.layouts:
        raise RecipeError([f"--search: {described(found)}; {_fix(found)}"])
    given = load_job(recipe, (), None, device_type, exempt=ELSEWHERE).config

    def text(changes: Changes, folder: Path) -> str:
        extends = Path(os.path.relpath(recipe, folder)).as_posix()
        return planned_recipe(with_changes(job, changes), given, extends)

    rows, best = fastest(found, max(SHOWN, timed)), 0
    if timed:
        folder = output.parent / f"{output.stem}_timed"
        recipes = [text(row["changes"], folder) for row in rows[:timed]]
        runs = time_layouts(folder, recipes, ranks)
        for row, run in zip(rows, runs, strict=False):
            row["measured"] = run
        best = fastest_run(runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text(rows[best]["changes"], output.parent), encoding="utf-8")
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
        "summary": described(found),
        "layouts": rows,
    }


def described(found: SearchResult) -> str:
    """Describe in a sentence how much was searched."""
    failed = sum(found.failed.values())
    text = (
        f"planned {found.planned:,} of {found.enumerated:,} layouts in {found.seconds:.0f} s, of "
        f"which {len(found.layouts)} fit; {found.without_room:,} need far more memory"
    )
    text += f"; {failed} could not be planned" if failed else ""
    return text if found.is_complete else f"{text}; the time was up before the others"


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
    which = "layout 1" if not found["best"] else f"layout {found['best'] + 1}, the fastest run"
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
