"""Loss and memory of optimizers: a section for each study of them.

    torchtitan compare train_configs/studies/optimizers_debug.toml
    python benchmarks/optimizers.py --output benchmarks/results/optimizers.md

The first makes the runs, and resumes where it was stopped; the second reads those that are
finished, from other seeds too (benchmarks/README.md). A variant is named after its optimizer and
its rate. The best rate of an optimizer is that with the lowest loss from the first seed, of those
at which no run diverged. Times are not those of the runs: each optimizer takes a step in turn, so
that other load slows all of them alike.
"""

import argparse
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from quoted import write_section
from variants import ROOT, Variant, conditions, draw, finished, model_size, studies

from torchtitan.device import Device
from torchtitan.resilience.exit_codes import ExitCode
from torchtitan.tools.compare.runs import read_outcome
from torchtitan.tools.compare.study import Study, prepare, tasks
from torchtitan.tools.verify.measure import training

WARM, TURNS = 5, 60
"""Steps of each optimizer before its times count, and while they do."""

PAGE = """\
## {title}

<!-- Written by benchmarks/optimizers.py. -->

A Llama of {parameters:,} parameters is trained for {steps} steps of {tokens} tokens on one
rank{about}

`torchtitan compare {study}`, then
`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}.
{times}
*Loss* is the mean of the last {last} steps, and over the seeds, ± their standard deviation. *Gap*
is the loss minus that of {base} with the same seed: the mean and the range.
*States* are what the optimizer had after its first step, as the run counted them.

{table}
![Loss at the end, by seed]({plot})

All rates, from one seed; a best rate at the end of a row may have a better one beyond it.

{rates}
Limits of this study:

{limits}
{spread}
- Factors of three between rates are coarse: what a finer sweep gains may be more than some gaps.
"""

SPREAD = """\
- {seeds} seeds of {base} are {chance:.3f} apart. Gaps are taken seed by seed. One that has one
  sign for all seeds suggests an order, which so few do not prove, and one with both signs shows
  nothing."""
ONE_SEED = """\
- From one seed, a gap does not show an order: another seed could change its sign. What has only one
  seed in the table has it for lack of time."""

TIMES = f"""
*ms/step* is the time of {TURNS} more steps, one of each optimizer in turn in one process, while
others used the machine: so **compare times with each other only**. A refresh of GaLore, in one of
20 steps, is not part of a median.
"""
NO_TIMES = """
Others used the machine meanwhile, which no number here depends on.
"""


class Words(NamedTuple):
    """The part of a page that is about its study; values in braces are those of `page`."""

    title: str
    about: str
    """The rest of the first sentence, and the conditions."""
    limits: str
    is_timed: bool = False


OPTIMIZERS = Words(
    title="Loss, time and memory",
    is_timed=True,
    about=""", by
each optimizer at three rates from one seed; the best of them is run from {seeds} seeds. All else is
that of the debug model: 20 steps of warm-up, a cosine, a limit of 1 on the gradient norm. Ranger21
has no such limit, as it is meant to have none, and weight decay is that of each by default.""",
    limits="""\
- The bytes of states are exact. Embedding and head are {outside:.0%} of a model this small, and
  many matrices are too small for codes, so what keeps less of hidden matrices alone, or in few
  bits, shows less of it than in a large one.
- At one rate, Muon and GaLore move matrices less than embedding, norms and head, which AdamW
  updates for them: Muon's update has a root mean square of 0.2, GaLore's is multiplied by 0.25.
  *AdamW by role* is AdamW in that way, with 4 times the rate outside of matrices. What it gains
  over AdamW is nothing that they do to matrices, so **compare them with it**.
- {steps} steps are {all_tokens:,} tokens, less than one for each parameter. Which optimizer is
  ahead so early says nothing of which is after billions, where the best rate, betas and weight
  decay are others. Ranger21 averages over 1,000 steps (beta2) and slows itself down by
  lookahead: of this it has the cost here, and hardly the use.""",
)
GALORE = Words(
    title="GaLore and AdamW, with rates tuned alike",
    about=""", by
AdamW and by GaLore in a half and a quarter of the rank ({dim}), each at as many rates from one
seed; the best of them is run from {seeds} seeds. GaLore takes a new basis every {refresh} steps,
and multiplies the updates of matrices by 0.25. So AdamW has 4 times the rate outside of matrices
(*by role*): in the full rank, GaLore is this AdamW at a quarter of GaLore's rate. None has weight
decay; all have eps 1e-8, a limit of 1 on the gradient norm, {warmup} steps of warm-up, and a
cosine.""",
    limits="""\
- Embedding and head, which GaLore updates by AdamW, are {outside:.0%} of a model this small. A
  low rank costs no less in a small model than in a large one, and saves less.
- {steps} steps are {all_tokens:,} tokens, in which a basis is computed {refreshes} times. The
  papers train for thousands of steps, with a refresh every 200 or 500 of them.
- The best rates of GaLore are higher than those of AdamW by more than its scale of 0.25, as an
  update of low rank is smaller. Embedding, norms and head, which share the rate, then learn faster
  too, and part of a gap may come from them.""",
)
RANGER21 = Words(
    title="Ranger21 without each of its additions",
    about=""", with
all additions of Ranger21, with none, which is AdamW with Ranger21's betas and decay, and without
one of them at a time. *All* and *none* are run at several rates from one seed; the others have the
best rate of *all*. All have Ranger21's schedule, with {warmup} steps of warm-up, and no limit on
the gradient norm.""",
    limits="""\
- Variants without one addition have the rate that is best with all of them. What an addition does
  to the size of updates, which another rate could do as well, is part of its gap.
- Without normalization, gradients are small next to the ln 2 / 50 that softplus adds to the
  denominator, so the same rate makes far smaller updates. That row shows that these two belong
  together, not what normalization gains.
- Decay is too slow to matter in {steps} steps: at the rate {lr:g}, weight decay of {decay:g}
  changes a weight by less than {decayed:.0e} of itself over the run where sigma is 1, as it
  nearly is for normalized gradients. What is found of decay and of norm loss is therefore chance.
- beta2 averages over 1,000 steps, and the run has {steps}.""",
)
STUDIES = {"optimizers": OPTIMIZERS, "galore": GALORE, "ranger21": RANGER21}
"""By the name of the study without `_debug`."""

COLUMNS = {
    "best rate": "---:",
    "states, bytes": "---:",
    "bytes per parameter": "---:",
    "ms/step (IQR)": "---:",
    "seeds": "---:",
    "loss": "---:",
    "gap": "---",
}
"""Alignment of each; times only where they were taken."""

RATES = """\
| | loss by rate |
|---|---|
{rows}
"""


def ended(studies: Sequence[Study]) -> tuple[dict[str, Variant], Counter[str]]:
    """Return the variants with finished runs, and how many runs of each variant diverged."""
    found, diverged = finished(studies), Counter[str]()
    for study in studies:
        for task in tasks(study, prepare(study)):
            outcome = read_outcome(task.folder)
            if (
                outcome is not None
                and outcome.key == task.key
                and outcome.status == ExitCode.DIVERGED
            ):
                diverged[task.ready.name] += 1
            assert task.ready.name in {*found, *diverged}, task.folder
    return found, diverged


def by_optimizer(found: Mapping[str, Variant]) -> dict[str, list[Variant]]:
    """Return the variants of each optimizer; their names are its own and a rate."""
    kinds: dict[str, list[Variant]] = {}
    for name, each in found.items():
        kinds.setdefault(name.rpartition(", ")[0], []).append(each)
    return kinds


def first_loss(each: Variant) -> float:
    """Return the loss from the seed that all variants were run with."""
    return next(iter(each.losses.values()))


def best(found: Mapping[str, Variant]) -> dict[str, Variant]:
    """Return each optimizer at the rate with the lowest loss."""
    return {kind: min(each, key=first_loss) for kind, each in by_optimizer(found).items()}


def milliseconds(variants: Sequence[Variant]) -> dict[str, str]:
    """Time a step of each, taken in turn: median and quartiles."""
    jobs = [
        each.job.model_copy(
            update={
                "training": each.job.training.model_copy(update={"steps": WARM + TURNS}),
                "metrics": each.job.metrics.model_copy(update={"log_freq": 1}),
            }
        )
        for each in variants
    ]
    seconds: dict[str, list[float]] = {each.name: [] for each in variants}
    with ExitStack() as opened:  # closed in the opposite order: the first made the process group
        runs = [
            opened.enter_context(closing(training(job, Device("cpu"), uneven=False)))
            for job in jobs
        ]
        for _ in range(WARM + TURNS):
            for each, run in zip(variants, runs, strict=True):
                begin = time.perf_counter()
                next(run)
                seconds[each.name].append(time.perf_counter() - begin)
    found = {}
    for name, of_steps in seconds.items():
        quartile, median, other = statistics.quantiles([1000 * s for s in of_steps[WARM:]], n=4)
        found[name] = f"{median:,.0f} ({quartile:,.0f} to {other:,.0f})"
    return found


def table(found: Mapping[str, Variant], base: Variant, times: Mapping[str, str]) -> str:
    """A row for each optimizer at its best rate."""
    rows = []
    for kind, each in best(found).items():
        losses = each.losses
        deviation = f" ± {statistics.stdev(losses.values()):.3f}" if len(losses) > 1 else ""
        gaps = [loss - base.losses[seed] for seed, loss in losses.items() if seed in base.losses]
        kept = each.first.state_bytes or 0
        gap = f"{statistics.fmean(gaps):+.3f}"
        gap += f" ({min(gaps):+.3f} to {max(gaps):+.3f})" if len(gaps) > 1 else ""
        cells = [
            *(kind, each.name.rpartition(", ")[2], f"{kept:,}"),
            f"{kept / model_size(each.job):.2f}",
            *([times[each.name]] if times else []),
            str(len(losses)),
            f"{statistics.fmean(losses.values()):.3f}{deviation}",
            "" if each is base else gap,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    columns = {name: line for name, line in COLUMNS.items() if times or "ms/step" not in name}
    head = ("", *columns), ("---", *columns.values())
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in head]
    return "\n".join([*lines, *rows]) + "\n"


def rates(study: Study, found: Mapping[str, Variant], diverged: Mapping[str, int]) -> str:
    """Every rate of each optimizer that has several."""
    losses: dict[str, list[str]] = {}
    for plan in study.plans:
        kind, _, rate = plan.name.rpartition(", ")
        loss = f"{first_loss(found[plan.name]):.3f}" if plan.name in found else "diverged"
        if plan.name in found and diverged[plan.name]:
            loss += " (diverged from another seed)"
        losses.setdefault(kind, []).append(f"{rate}: {loss}")
    rows = [f"| {kind} | {', '.join(each)} |" for kind, each in losses.items() if len(each) > 1]
    return RATES.format(rows="\n".join(rows))


def words(name: str, found: Mapping[str, Variant], base: Variant) -> dict[str, str]:
    """Return the title of a page, its conditions and its limits."""
    job, text = base.job, STUDIES[name]
    schedule, optimizer = job.lr_scheduler, job.optimizer
    periods = {getattr(each.job.optimizer, "refresh_period", 0) for each in found.values()}
    steps = job.training.steps
    values = {
        **conditions(base),
        "dim": job.model_args().dim,
        "warmup": schedule.warmup(steps),
        "refresh": max(periods),
        "refreshes": math.ceil(steps / max(periods, default=0)) if max(periods) else 0,
        "lr": optimizer.lr,
        "decay": optimizer.weight_decay,
        "decayed": steps * optimizer.lr * optimizer.weight_decay,
    }
    return {key: getattr(text, key).format(**values) for key in ("title", "about", "limits")}


def page(
    name: str,
    study: Study,
    found: Mapping[str, Variant],
    listed: str,
    times: Mapping[str, str],
    plot: str,
    command: str,
) -> str:
    base = found[study.baseline]
    known = conditions(base)
    spreads = [SPREAD] if len(base.losses) > 1 else []
    if any(len(each.losses) == 1 for each in best(found).values()):
        spreads.append(ONE_SEED)
    return PAGE.format(
        **words(name, found, base),
        **known,
        spread="\n".join(spreads).format(**known),
        study=path_of(name).relative_to(ROOT),
        command=command,
        times=TIMES if times else NO_TIMES,
        table=table(found, base, times),
        rates=listed,
        plot=plot,
    )


def path_of(name: str) -> Path:
    return ROOT / f"train_configs/studies/{name}_debug.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", nargs="?", choices=STUDIES, default="optimizers")
    parser.add_argument("--output", type=Path, help="file for the page; the plot is put next to it")
    arguments = parser.parse_args()
    name = arguments.study
    study, *others = studies(path_of(name))
    ran, diverged = ended([study, *others])
    found = {name: each for name, each in ran.items() if not diverged[name]}
    listed = rates(study, ran, diverged)
    command = " ".join(["python", "benchmarks/optimizers.py", *sys.argv[1:]])
    times = milliseconds(list(best(found).values())) if STUDIES[name].is_timed else {}
    text = page(name, study, found, listed, times, f"{name}.svg", command)
    print(text)
    if arguments.output:
        write_section(arguments.output, text)
        picture = draw(list(best(found).values()), "optimizer at its best rate")
        arguments.output.with_name(f"{name}.svg").write_text(str(picture))


if __name__ == "__main__":
    main()
