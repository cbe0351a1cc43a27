"""The layouts that a search found, as JSON and as text, and the best as a recipe."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.checks import TOKENIZER, load_job
from torchtitan.config import RecipeError
from torchtitan.estimate.hardware import Hardware
from torchtitan.estimate.search import (
    BATCH,
    SHARDS,
    SearchResult,
    fastest,
    planned_recipe,
    search,
    with_changes,
)
from torchtitan.job import JobConfig

Json = dict[str, Any]
FEW_RANKS = 1024
SECONDS, SECONDS_OF_MANY = 45.0, 240.0
"""Time of a search on up to `FEW_RANKS`, and on more."""
SHOWN = 5
"""Number of layouts that are listed."""


def search_layouts(
    recipe: Path, job: JobConfig, ranks: int, hardware: Hardware, device_type: str, output: Path
) -> Json:
    """Search the layouts of a recipe, and write the best as one that extends it.

    Raises:
        RecipeError: if no layout fits.
    """
    limit = SECONDS if ranks <= FEW_RANKS else SECONDS_OF_MANY
    found = search(job, ranks, hardware, device_type=device_type, seconds=limit)
    if not found.layouts:
        raise RecipeError([f"--search: {described(found)}; {_fix(found)}"])
    given = load_job(recipe, (), None, device_type, exempt=(TOKENIZER,)).config
    output.parent.mkdir(parents=True, exist_ok=True)
    extends = Path(os.path.relpath(recipe, output.parent)).as_posix()
    best = with_changes(job, found.layouts[0].changes)
    output.write_text(planned_recipe(best, given, extends), encoding="utf-8")
    return {
        "recipe": str(output),
        "enumerated": found.enumerated,
        "refused": found.refused,
        "without_room": found.without_room,
        "planned": len(found.layouts) + len(found.too_large),
        "failed": found.failed,
        "is_complete": found.is_complete,
        "seconds": found.seconds,
        "summary": described(found),
        "layouts": fastest(found, SHOWN),
    }


def described(found: SearchResult) -> str:
    """Describe in a sentence how much was searched."""
    planned, failed = len(found.layouts) + len(found.too_large), sum(found.failed.values())
    text = (
        f"planned {planned:,} of {found.enumerated:,} layouts in {found.seconds:.0f} s, of which "
        f"{len(found.layouts)} fit; {found.without_room:,} cannot fit"
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
    yield f"recipe: {found['recipe']}"


def words(changes: Mapping[str, Any]) -> str:
    """Describe a layout in short; degrees of 1 are left out."""
    shown = (
        (key.partition(".")[2].removesuffix("_degree"), value)
        for key, value in changes.items()
        if key not in (BATCH, SHARDS) and not (key.endswith("_degree") and value == 1)
    )
    return ", ".join(f"{name} {value}" for name, value in shown)
