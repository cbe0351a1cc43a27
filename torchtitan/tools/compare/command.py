"""Run recipes side by side under the same conditions, or compare existing runs; write a report."""

from pathlib import Path
from typing import Annotated

import typer

from torchtitan.config import ConfigError, find_recipe
from torchtitan.tools.compare import FORMS, compare_folders, dry_run, read, summary
from torchtitan.tools.compare import compare as run_and_compare
from torchtitan.tools.options import Count, RecipeVerb, verb

DEFAULT = "(default: that of the study, or"
app = verb()


@app.command(cls=RecipeVerb, help=__doc__)
def compare(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Study, or recipes, or folders of runs (job.dump_folder)."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Setting to vary, with a variant for each value."),
    ] = None,
    ranks: Annotated[
        int | None, Count(f"Number of ranks of a run {DEFAULT} the minimum of its recipe).")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Variant to compare with {DEFAULT} the first)."),
    ] = None,
    rounds: Annotated[int | None, Count(f"Number of runs of each variant {DEFAULT} 3).")] = None,
    warmup_steps: Annotated[
        int | None, Count(f"Number of steps before those measured {DEFAULT} 5).")
    ] = None,
    steps: Annotated[int | None, Count(f"Number of measured steps {DEFAULT} 20).")] = None,
    no_trace: Annotated[bool, typer.Option("--no-trace", help="Trace no step.")] = False,
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder for the runs and the report.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print the runs that would start, without starting any.")
    ] = False,
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
            place, report = study.output, run_and_compare(study)
        except KeyboardInterrupt:
            print(f"stopped; the same command continues with what is left ({study.output})")
            return 130
    print(*summary(report), *(place / f"report.{form}" for form in FORMS), sep="\n")
    return 0 if report.ran and all(each.status != "failed" for each in report.variants) else 1
