"""Predict a recipe's memory and speed on hardware that you do not have.

Given the folder of a run, also show what the run measured.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from torchtitan import config
from torchtitan.checks import ELSEWHERE, is_error_of, load_job, problems
from torchtitan.config import PlannedWorld, RecipeError, find_recipe, print_message
from torchtitan.device import DeviceType
from torchtitan.inputs import require_recipe
from torchtitan.job import RECIPE_FILE, JobConfig
from torchtitan.plan.comparison import measured_rows, measured_text
from torchtitan.plan.fitting import FittingChange, changes
from torchtitan.plan.hardware import Hardware, find_hardware, hardware_names, hardware_of
from torchtitan.plan.hardware.calibrate import calibrate
from torchtitan.plan.page import plan_page
from torchtitan.plan.plan import plan
from torchtitan.plan.plan_report import Json, plan_json, plan_text
from torchtitan.plan.search import LEAST
from torchtitan.plan.search_report import (
    SECONDS,
    require_devices,
    search_layouts,
    search_text,
    write_best,
)
from torchtitan.tools.history import RunHistory
from torchtitan.tools.options import (
    Count,
    DeviceMemory,
    Recipe,
    RecipeVerb,
    count,
    number,
    progress,
    verb,
)

KEY = "job.hardware"
NOT_NEEDED = (*ELSEWHERE, KEY)
"""Keys that may be wrong where other hardware is known."""
UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
MOST_RANKS = 2**20
NEAR = 64
"""Number of smaller and of larger world sizes that are tried in place of one that is refused."""

app = verb()


def token_count(word: object) -> float:
    """Read a number of tokens, such as 15T."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbt]?)", str(word).lower().replace("_", ""))
    if found is None or not 0 < (tokens := float(found[1]) * UNITS[found[2]]) < 1e24:
        raise typer.BadParameter(f"got {word}; wanted a number of tokens, such as 15T or 300B")
    return tokens


@app.command(cls=RecipeVerb, help=__doc__, name="plan")
def plan_recipe(
    context: typer.Context,
    recipe: Recipe = None,
    world_size: Annotated[
        int | None,
        Count("Number of ranks (default: that of the recipe, or the minimum of its layout)."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME | FILE",
            help=f"Hardware, {', '.join(hardware_names())} or a file (default: the recipe's).",
        ),
    ] = None,
    device_memory: Annotated[
        float | None, DeviceMemory("Memory of a device (default: that of the hardware).")
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            parser=token_count,
            metavar="N",
            help="Budget of the run, such as 15T (default: all steps of the recipe).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page with plots.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Also plan other layouts; write the best as a recipe.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            parser=number("seconds, a number >= 0", lambda found: 0 <= found < inf),
            metavar="N",
            help=f"Time to search (default: {SECONDS:.0f}); at least {LEAST} layouts are planned.",
        ),
    ] = None,
    timed: Annotated[
        int | None,
        typer.Option(
            "--time",
            parser=count,
            metavar="K",
            help="With --search: also run the best K layouts for a few steps on this machine.",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Measure this machine instead, and write it as a hardware file."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Recipe of the best layout, or hardware file (default: outputs/NAME_planned.toml, "
            "outputs/hardware.toml).",
        ),
    ] = None,
) -> int:
    path, flags = config.split_recipe([*([recipe] if recipe else []), *context.args])
    history = RunHistory.open(Path(path)) if path and Path(path).is_dir() else None
    if history:
        path = str(history.folder / RECIPE_FILE)
        world_size = world_size or history.ranks
    require_recipe(path, flags, "plan")
    mistakes = [*_mistakes(html, output, search, seconds, timed)]
    devices: Hardware | None = None

    def load(
        ranks: int | None, more: Sequence[str] = (), exempt: Sequence[str] = NOT_NEEDED
    ) -> config.Recipe[JobConfig]:
        return load_job(path, [*flags, *more], ranks, _type(devices, history), exempt=exempt)

    with collected(mistakes):
        devices = None if hardware is None else find_hardware(hardware)
    with collected(mistakes):
        try:
            job = load(None).config
        except RecipeError:
            if hardware is None and not history:
                load(None, exempt=ELSEWHERE)  # reports its hardware too
            raise
        if hardware is None and history:
            devices = hardware_of(job.job.hardware, history.device_type, history.device or "")
        elif hardware is None and job.job.hardware:
            with collected(mistakes):
                devices = find_hardware(job.job.hardware, KEY)
        ranks = world_size or job.job.ranks or job.parallelism.least_ranks
        found = _for_ranks(load, job, ranks, _type(devices, history))
    if search and path is None:
        mistakes.append("--search: it needs a recipe; name one")
    elif search and not (hardware or devices or (mistakes and _states_hardware(path, flags))):
        mistakes.append("--search: it needs the hardware; add --hardware")
    if search and not mistakes and found.config.training.stages:
        mistakes.append(
            "--search: the recipe has training.stages; name one with the sizes of one stage"
        )
    if mistakes:
        raise RecipeError(mistakes)
    for notice in found.notices:
        print_message("note", notice)
    if measure:
        place = output or Path("outputs/hardware.toml")
        place.parent.mkdir(parents=True, exist_ok=True)
        with progress("measuring this machine"):
            calibrate(found.config, ranks, place)
        print(f"hardware: {place}")
        return 0
    if timed and devices:
        require_devices(devices, ranks)
    if devices and device_memory:
        devices = devices.model_copy(update={"memory_gib": device_memory})
    with progress(f"planning {ranks:,} ranks") as advance:
        planned = plan(
            found.config,
            ranks,
            devices,
            device_type=_type(devices, history),
            capacity_gib=device_memory,
            count=advance,
        )
    layouts: Json = {}
    given = find_recipe(path) if search and path else None
    if given:
        place = output or Path("outputs") / f"{given.stem}_planned.toml"
        with progress(f"searching layouts of {ranks:,} ranks"):
            words = (given, planned, _type(devices), place)
            time_limit = SECONDS if seconds is None else seconds
            layouts = search_layouts(*words, seconds=time_limit, timed=timed or 0)
    smaller: list[FittingChange] = []
    if planned.fits is False:
        with progress("looking for changes after which it fits") as advance:
            smaller = changes(lambda size, more: load(size, more).config, planned, count=advance)
    answer = plan_json(planned, tokens=tokens, changes=smaller)
    answer |= {"search": layouts} if search else {}
    rows = measured_rows(planned, history) if history else []
    answer |= {"measured": [row._asdict() for row in rows]} if rows else {}
    text = [json.dumps(answer, indent=1)] if as_json else [*plan_text(answer)]
    text += search_text(layouts) if given and not as_json else []
    text += ["", *measured_text(rows)] if rows and not as_json else []
    if html:
        html.write_text(plan_page(planned, answer).html(), encoding="utf-8")
        text += [] if as_json else ["", f"page: {html}"]
    # In one piece, so that `| head` does not close the pipe in between.
    print("".join(f"{line}\n" for line in text), end="", flush=True)
    if given:
        write_best(layouts, given, planned, _type(devices))
    for note in planned.notes:
        print_message("warning", note)
    return 0


@contextmanager
def collected(mistakes: list[str]) -> Iterator[None]:
    """Add the mistakes that are found inside to others, instead of raising them."""
    try:
        yield
    except RecipeError as error:
        mistakes += error.lines


def _mistakes(
    html: Path | None, output: Path | None, search: bool, seconds: float | None, timed: int | None
) -> Iterator[str]:
    """Yield what is wrong with the options alone."""
    if html and not html.resolve().parent.is_dir():
        yield f"--html: got {html}; make its folder"
    for option, file in (("--html", html), ("--output", output)):
        if file and file.is_dir():
            yield f"{option}: got {file}; name a file in this folder"
    if timed and not search:
        yield f"--time: got {timed}; add --search, whose layouts it times"
    if seconds is not None and not search:
        yield f"--seconds: got {seconds:g}; add --search, whose time it is"


def _states_hardware(recipe: str | None, flags: Sequence[str]) -> bool:
    """Whether a recipe, which may have mistakes, says which hardware it is for."""
    try:
        files = config.read_sources(recipe).settings
    except config.ConfigError:  # which is reported where it is read
        return True
    is_in_file = any(tuple(KEY.split(".")) in settings for settings in files)
    return is_in_file or any(word.startswith(f"--{KEY}") for word in flags)


def _for_ranks(
    load: Callable[[int], config.Recipe[JobConfig]], job: JobConfig, ranks: int, device_type: str
) -> config.Recipe[JobConfig]:
    """Read a recipe for a number of ranks; an error names the nearest that it can use."""
    if ranks > MOST_RANKS:
        raise RecipeError([f"--world-size: got {ranks}; use at most {MOST_RANKS:,}"])
    try:
        return load(ranks)
    except RecipeError as error:
        if near := near_sizes(job, ranks, device_type):
            sizes = " or ".join(f"{size:,}" for size in near)
            error.lines.append(f"--world-size: got {ranks}; use {sizes}, which this recipe can use")
        raise


def near_sizes(job: JobConfig, ranks: int, device_type: str) -> list[int]:
    """Return the nearest numbers of ranks below and above `ranks` that a recipe can use."""

    def runs(size: int) -> bool:
        found = problems(job, PlannedWorld(size, device_type))
        return all(each.severity == "note" or is_error_of(each, NOT_NEEDED) for each in found)

    least = job.parallelism.least_ranks
    if job.parallelism.data_parallel_shard_degree != -1:
        candidates = [[least]] if least != ranks else []
    else:
        below = range((ranks - 1) // least * least, 0, -least)
        above = range(ranks // least * least + least, (ranks // least + NEAR) * least, least)
        candidates = [[*below[:NEAR]], [*above]]
    nearest = (next(filter(runs, sizes), None) for sizes in candidates)
    return [size for size in nearest if size]


def _type(devices: Hardware | None, history: RunHistory | None = None) -> DeviceType:
    known = devices or history
    return known.device_type if known else "cuda"
