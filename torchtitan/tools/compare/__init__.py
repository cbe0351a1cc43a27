"""`torchtitan compare`: recipes side by side, run under the same conditions.

study      the variants to compare: a file, recipes, or one recipe varied
prepare    checks each variant, and plans its runs
running    starts the runs, one after the other
measured_run  numbers of a run; parity: whether two runs train the same
gather     builds the report (results) from all of them
markdown   the report as text, with its verdict; html_page: the page, with plots
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from torchtitan.checkpoint import lock
from torchtitan.config import RecipeError
from torchtitan.device import DeviceType, pick
from torchtitan.estimate.fitting import peak_of, plan_on
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.tools.compare.gather import Candidate, of_folder, planned_collectives, report
from torchtitan.tools.compare.html_page import html_page
from torchtitan.tools.compare.markdown import byte_size, markdown
from torchtitan.tools.compare.measured_run import MeasuredRun
from torchtitan.tools.compare.prepare import PlannedRun, Ready, launcher, prepare, tasks
from torchtitan.tools.compare.results import Report
from torchtitan.tools.compare.running import (
    is_done,
    launch_all,
    read_outcome,
    terminable,
    write_whole,
)
from torchtitan.tools.compare.study import Study, is_study, of_recipes, read_study, slug
from torchtitan.tools.history import METRICS_FILE

__all__ = ["FORMS", "compare", "compare_folders", "dry_run", "read", "summary"]

LOSSES = {
    "baseline": "baseline",
    "same": "same loss",
    "within seeds": "loss of a seed",
    "differs": "other loss",
    "not judged": "loss not judged",
}
"""Verdicts on a variant, as a line has room for them."""
FORMS = ("md", "html", "json")
"""Formats in which a report is written."""


def read(
    paths: Sequence[Path], variations: Sequence[str], flags: Sequence[str], **changes: Any
) -> Study:
    """Make the study that the arguments of the command describe.

    Raises:
        RecipeError: if they describe none.
    """
    studies = [path for path in paths if is_study(path)]
    if not studies:
        return of_recipes(paths, variations, flags, **changes)
    if len(paths) > 1 or variations:
        what = "--vary" if variations else "other recipes"
        raise RecipeError([f"{studies[0]}: a study stands by itself; got {what} too"])
    return read_study(studies[0], flags, **changes)


def dry_run(study: Study) -> Iterator[str]:
    """Describe what a comparison would do, a line each; nothing is started.

    Raises:
        RecipeError: as `compare`.
    """
    variants = prepare(study)
    device_type = cast(DeviceType, study.conditions.device or pick().type)
    for ready in variants:
        ranks = f"{ready.plan.ranks} rank{'s' * (ready.plan.ranks > 1)}"
        told = (
            "cannot run" if ready.problems else foreseen(ready.job, ready.plan.ranks, device_type)
        )
        yield f"{ready.name}: {ranks}: {told}"
        yield from (f"  {line}" for line in ready.problems)
    todo = tasks(study, variants)
    done = sum(is_done(task) for task in todo)
    steps = todo[0].job.training.steps if todo else 0
    yield f"{len(todo)} runs of {steps} steps, {done} of them there already; in {study.output}"


def foreseen(job: JobConfig, ranks: int, device_type: DeviceType) -> str:
    """Plan the memory of a rank, and the bytes that it sends."""
    device = pick().name if device_type == pick().type else ""
    try:
        plan = plan_on(job, ranks, device_type, device)
    except RecipeError as error:
        return error.lines[0]
    peak, sent = peak_of(plan), sum(size for _, size in planned_collectives(plan).values())
    memory = f"about {peak.device + peak.host:.3g} GiB a rank"
    return f"{memory}; rank 0 sends {byte_size(sent)} a step"


def compare(study: Study) -> Report:
    """Check all variants, make the runs that are not there yet, and write the report.

    Raises:
        ConfigError: before anything is started, where a setting does not exist or is not valid, or
            another comparison writes into the folder.
    """
    variants = prepare(study)
    for ready in variants:
        for line in ready.problems:
            logger.warning("%s cannot run: %s", ready.name, line)
    todo = tasks(study, variants)
    with lock(study.output, "output"), terminable():
        launch_all(todo, launcher(study))
    conditions = study.conditions
    last = conditions.warmup_steps + conditions.steps
    chosen = conditions.model_dump(exclude={"title", "description", "baseline", "output"})
    found = report(
        [_candidate(ready, todo, conditions.warmup_steps, last) for ready in variants],
        study.baseline,
        title=study.title,
        description=conditions.description,
        conditions={"study": study.place} | chosen,
        root=study.output,
    )
    write(found, study.output)
    return found


def compare_folders(
    folders: Sequence[Path], baseline: str | None, output: Path, warmup: int
) -> Report:
    """Compare existing runs, and write the same report from their folders.

    Raises:
        ConfigError: if a folder has no run, or `output` has the report of other runs.
    """
    if len(folders) < 2:
        raise RecipeError([f"{folders[0]}: is one run; wanted two or more to compare"])
    earlier = output / "report.json"
    if earlier.exists():
        conditions = json.loads(earlier.read_text(encoding="utf-8"))["conditions"]
        if conditions.get("folders") != [str(folder) for folder in folders]:
            raise RecipeError(
                [f"{output}: has the report of other runs; choose another folder with --output"]
            )
    names = [folder.name for folder in folders]
    if len({slug(name) for name in names}) < len(names):
        names = [str(folder) for folder in folders]
    candidates = [of_folder(*pair, warmup) for pair in zip(names, folders, strict=True)]
    if baseline is not None and baseline not in names:
        raise RecipeError([f"--baseline: got {baseline}; allowed: {', '.join(names)}"])
    found = report(
        candidates,
        baseline or names[0],
        title=" and ".join(names),
        description="Runs that were made before, as they are.",
        conditions={"warmup_steps": warmup, "folders": [str(folder) for folder in folders]},
        root=output,
    )
    write(found, output)
    return found


def summary(found: Report) -> Iterator[str]:
    """A line for each variant: whether it trains the same, then how fast."""
    width = max(len(each.name) for each in found.variants)
    for each in found.variants:
        line: str = each.status
        if each.tps is not None:
            line = (
                f"{LOSSES[each.parity.verdict]:<15}  {each.tps.median:10,.0f} {each.unit}/s/device"
            )
            if (speed := each.ratio) and each.name != found.baseline:
                line += f"  {speed.median:.2f}x speed"
                line += f" ({speed.least:.2f} to {speed.most:.2f})" * (speed.count > 1)
        yield f"{each.name:<{width}}  {line}"


def write(found: Report, folder: Path) -> None:
    """Write a report in all formats."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "report.json", found.to_json())
    write_whole(folder / "report.md", markdown(found))
    write_whole(folder / "report.html", html_page(found))


def _candidate(ready: Ready, todo: Sequence[PlannedRun], warmup: int, last: int) -> Candidate:
    own = [task for task in todo if task.ready is ready]
    name, job, ranks = ready.name, ready.job, ready.plan.ranks
    if ready.problems:
        return Candidate(name, job, ranks, "cannot run", ready.problems)
    done = [task for task in own if is_done(task) and (task.folder / METRICS_FILE).is_file()]
    runs = [(task, MeasuredRun(task.folder, task.round, task.seed, warmup, last)) for task in done]
    rounds = tuple(run for task, run in runs if task.folder.name.startswith("round"))
    seeds = tuple(run for task, run in runs if task.folder.name.startswith("seed"))
    failed = [(task, outcome) for task in own if (outcome := read_outcome(task.folder))]
    reasons = tuple(
        f"{task.folder.name}: status {outcome.status}: {line}"
        for task, outcome in failed
        if outcome.status
        for line in outcome.last_lines[-3:]
    )
    status = "ran" if rounds else "failed" if reasons else "not run"
    return Candidate(name, job, ranks, status, reasons, rounds, seeds)  # type: ignore[arg-type]
