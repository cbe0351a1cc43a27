"""The layouts that a search found, as JSON and as text, and the best as a recipe."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.checks import ELSEWHERE, load_job
from torchtitan.config import RecipeError
from torchtitan.device import DeviceType
from torchtitan.plan.layouts import BATCH, SHARDS, own_layout, with_changes
from torchtitan.plan.plan import Plan
from torchtitan.plan.search import SearchResult, fastest, planned_recipe, search

Json = dict[str, Any]
SECONDS = 45.0
"""Time of a search by default."""
SHOWN = 5
"""Number of layouts that are listed."""


def search_layouts(
    recipe: Path, planned: Plan, device_type: DeviceType, output: Path, *, seconds: float = SECONDS
) -> Json:
    """Search the layouts of a planned recipe.

    Args:
        output: file for the best layout, which `write_best` writes.
        seconds: time of the search; it plans a few layouts at least.

    Raises:
        RecipeError: if no layout fits.
    """
    job, ranks, hardware = planned.job, planned.ranks, planned.hardware
    assert hardware is not None, "the command asked for it"
    found = search(job, planned, hardware, device_type=device_type, seconds=seconds)
    if not found.layouts:
        raise RecipeError([f"--search: none of {described(found)}; {_fix(found)}"])
    rows = fastest(found, SHOWN)
    return {
        "recipe": str(output),
        "best": 0,
        "is_own": rows[0]["changes"] == own_layout(job, ranks),
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
    output, changes = Path(found["recipe"]), found["layouts"][0]["changes"]
    given = load_job(recipe, (), None, device_type, exempt=ELSEWHERE).config
    extends = Path(os.path.relpath(recipe, output.parent)).as_posix()
    title = found["title"][:1].upper() + found["title"][1:]
    text = planned_recipe(with_changes(planned.job, changes), given, extends, title)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")


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
    own = ", which the recipe has already" if found["is_own"] else ""
    yield f"recipe: {found['recipe']}: layout 1{own}"


def words(changes: Mapping[str, Any]) -> str:
    """Describe a layout in short; degrees of 1 are left out."""
    shown = (
        (key.partition(".")[2].removesuffix("_degree"), value)
        for key, value in changes.items()
        if key not in (BATCH, SHARDS) and not (key.endswith("_degree") and value == 1)
    )
    return ", ".join(f"{name} {value}" for name, value in shown)
