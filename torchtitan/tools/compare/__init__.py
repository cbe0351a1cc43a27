"""Run recipes side by side under the same conditions, or compare existing runs; write a report."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from torchtitan.checkpoint import lock
from torchtitan.config import ConfigError, RecipeError, find_recipe
from torchtitan.device import pick
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.provenance import write_whole
from torchtitan.tools.compare.gather import Candidate, plan_of, read_run, report
from torchtitan.tools.compare.report_page import LOSSES, byte_size, report_page
from torchtitan.tools.compare.results import Report
from torchtitan.tools.compare.runs import MeasuredRun, is_done, launch_all, read_outcome, terminable
from torchtitan.tools.compare.study import (
    PlannedRun,
    Ready,
    Study,
    is_study,
    make_study,
    prepare,
    read_study,
    slug,
    tasks,
)
from torchtitan.tools.history import METRICS_FILE
from torchtitan.tools.options import Count, Flag, RecipeVerb, Text, verb

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
        return make_study(paths, variations, flags, **changes)
    if len(paths) > 1 or variations:
        what = "--vary" if variations else "other recipes"
        raise RecipeError([f"{studies[0]}: a study stands by itself; got {what} too"])
    return read_study(studies[0], flags, **changes)


def dry_run(study: Study) -> Iterator[str]:
    """Describe what a comparison would do, a line each; nothing is started.

    Raises:
        RecipeError: as `compare_recipes`.
    """
    variants = prepare(study)
    for ready in variants:
        ranks = f"{ready.plan.ranks} rank{'s' * (ready.plan.ranks > 1)}"
        told = "cannot run" if ready.problems else foreseen(ready.job, ready.plan.ranks)
        yield f"{ready.name}: {ranks}: {told}"
        yield from (f"  {line}" for line in ready.problems)
    todo = tasks(study, variants)
    done = sum(is_done(task) for task in todo)
    steps = todo[0].job.training.steps if todo else 0
    yield f"{len(todo)} runs of {steps} steps, {done} of them there already; in {study.output}"


def foreseen(job: JobConfig, ranks: int) -> str:
    """Plan the memory of a rank, and the bytes that it sends."""
    device = pick()
    plan = plan_of(job, ranks, device.type, device.name)
    if isinstance(plan, str):
        return plan
    sent = sum(size for _, size in plan.collectives.values())
    return f"about {plan.peak_gib:.3g} GiB per rank; rank 0 sends {byte_size(sent)} per step"


def compare_recipes(study: Study) -> Report:
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
        launch_all(todo)
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
    candidates = [read_run(*pair, warmup) for pair in zip(names, folders, strict=True)]
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
    page = report_page(found)
    write_whole(folder / "report.md", page.markdown())
    write_whole(folder / "report.html", page.html())


def _candidate(ready: Ready, todo: Sequence[PlannedRun], warmup: int, last: int) -> Candidate:
    own = [task for task in todo if task.ready is ready]
    name, job, ranks = ready.name, ready.job, ready.plan.ranks
    if ready.problems:
        return Candidate(name, job, ranks, "cannot run", ready.problems)
    done = [task for task in own if is_done(task) and (task.folder / METRICS_FILE).is_file()]
    seed = job.debug.seed
    runs = tuple(MeasuredRun(task.folder, task.round, seed, warmup, last) for task in done)
    failed = [(task, outcome) for task in own if (outcome := read_outcome(task.folder))]
    reasons = tuple(
        f"{task.folder.name}: status {outcome.status}: {line}"
        for task, outcome in failed
        if outcome.status
        for line in outcome.last_lines[-3:]
    )
    status = "ran" if runs else "failed" if reasons else "not run"
    return Candidate(name, job, ranks, status, reasons, runs)  # type: ignore[arg-type]


DEFAULT = "(default: the study's, or"
app = verb()


@app.command(cls=RecipeVerb, help=__doc__)
def compare(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Study, or recipes, or folders of runs (job.dump_folder)."),
    ] = None,
    vary: Annotated[
        list[str] | None, Text("KEY=A,B", "Setting to vary, with a variant for each value.")
    ] = None,
    ranks: Annotated[
        int | None, Count(f"Number of ranks of a run {DEFAULT} the minimum of its recipe).")
    ] = None,
    baseline: Annotated[
        str | None, Text("NAME", f"Variant to compare with {DEFAULT} the first).")
    ] = None,
    rounds: Annotated[int | None, Count(f"Number of runs of each variant {DEFAULT} 3).")] = None,
    warmup_steps: Annotated[
        int | None, Count(f"Number of unmeasured steps at the start {DEFAULT} 5).")
    ] = None,
    steps: Annotated[int | None, Count(f"Number of measured steps {DEFAULT} 20).")] = None,
    no_trace: Annotated[bool, Flag("--no-trace", "Trace no step.")] = False,
    output: Annotated[str | None, Text("FOLDER", "Folder for the runs and the report.")] = None,
    check: Annotated[bool, Flag("--check", "Print the runs without starting them.")] = False,
) -> int:
    paths, vary = paths or [], vary or []
    folders = [path for path in paths if path.is_dir()]
    if folders:
        if len(folders) < len(paths) or vary or context.args:
            raise ConfigError(f"{folders[0]}: is a folder; runs are compared as they are")
        place = Path(output or "outputs/studies/of_runs")
        warmup = 5 if warmup_steps is None else warmup_steps
        report = compare_folders(folders, baseline, place, warmup)
    else:
        study = read(
            [find_recipe(path) for path in paths],
            vary,
            context.args,
            ranks=ranks,
            baseline=baseline,
            rounds=rounds,
            warmup_steps=warmup_steps,
            steps=steps,
            trace=False if no_trace else None,
            output=output,
        )
        if check:
            print(*dry_run(study), sep="\n")
            return 0
        try:
            place, report = study.output, compare_recipes(study)
        except KeyboardInterrupt:
            print(f"stopped; the same command continues with what is left ({study.output})")
            return 130
    print(*summary(report), *(place / f"report.{form}" for form in FORMS), sep="\n")
    return 0 if report.ran and all(each.status != "failed" for each in report.variants) else 1
