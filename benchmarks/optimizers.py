"""What each optimizer learns, takes and keeps: a page of the runs of a study.

    torchtitan compare train_configs/studies/optimizers_debug.toml
    python benchmarks/optimizers.py --output benchmarks/results/optimizers.md

The first makes the runs, and goes on where it was stopped; the second reads those that are there. A
variant is called after its optimizer and its rate. The best rate of an optimizer is that of the
lowest loss from the seed that all were run with; it is run from the others too. Times are not those
of the runs: here each takes a step in turn, so that what else the machine does slows all alike.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from quoted import quote
from variants import LAST, ROOT, Variant, draw, finished, model_size

from torchtitan.device import Device
from torchtitan.tools.compare.study import Study, read_study
from torchtitan.tools.verify.measure import training

STUDY = ROOT / "train_configs/studies/optimizers_debug.toml"
WARM, TURNS = 5, 60
"""Steps of each optimizer before its times count, and while they do."""

PAGE = """\
# Optimizers: loss, time and memory

<!-- Written by benchmarks/optimizers.py. -->

A Llama of {parameters:,} parameters is trained for {steps} steps of {tokens} tokens on one rank, by
each optimizer at three rates from one seed; the best of them is run from {seeds} seeds. All else is
that of the debug model: 20 steps of warm-up, a cosine, a limit of 1 on the gradient norm. Ranger21
has no such limit, as it is meant to have none, and weight decay is that of each by default.

`torchtitan compare {study}`, then
`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}.

*ms/step* is the time of {turns} more steps, one of each optimizer in turn in one process, while
others used the machine: so **compare times with each other only**. A refresh of GaLore, in one of
20 steps, is not part of a median.

*Loss* is the mean of the last {last} steps, and over the seeds, ± their standard deviation. *Gap*
is the loss minus that of {base} with the same seed: the mean and the range.
*States* are what the optimizer had after its first step, as the run counted them.

{table}
![Loss at the end, by seed]({plot})

## All rates

From one seed. A best rate at the end of a row may have a better one beyond it.

{rates}
## Limits of this study

- The bytes of states are exact. Embedding and head are {outside:.0%} of a model this small, and
  many matrices are too small for codes, so what keeps less of hidden matrices alone, or in few
  bits, shows less of it than in a large one.
- At one rate, Muon and GaLore move matrices less than embedding, norms and head, which AdamW
  updates for them: Muon's update has a root mean square of 0.2, GaLore's is multiplied by 0.25.
  *AdamW by role* is AdamW in that way, with 4 times the rate outside of matrices. What it gains
  over AdamW is nothing that they do to matrices, so **compare them with it**.
- {seeds} seeds of {base} lie {chance:.3f} apart. Gaps are taken seed by seed. One that has one
  sign for all seeds suggests an order, which so few do not prove, and one with both signs shows
  nothing.
- {steps} steps are {all_tokens:,} tokens, less than one for each parameter. Which optimizer is
  ahead so early says nothing of which is after billions, where the best rate, betas and weight
  decay are others. Ranger21 averages over 1,000 steps (beta2) and slows itself down by
  lookahead: of this it has the cost here, and hardly the use.
- Factors of three between rates are coarse: what a finer sweep gains may be more than some gaps.
"""

TABLE = """\
| | best rate | states, bytes | bytes per parameter | ms/step (IQR) | seeds | loss | gap |
|---|---:|---:|---:|---:|---:|---:|---|
{rows}
"""

RATES = """\
| | loss by rate |
|---|---|
{rows}
"""


def by_optimizer(found: Mapping[str, Variant]) -> dict[str, list[Variant]]:
    """The variants of each, whose names are its own and a rate."""
    kinds: dict[str, list[Variant]] = {}
    for name, each in found.items():
        kinds.setdefault(name.rpartition(", ")[0], []).append(each)
    return kinds


def first_loss(each: Variant) -> float:
    """From the seed that all variants were run with."""
    return next(iter(each.losses.values()))


def best(found: Mapping[str, Variant]) -> dict[str, Variant]:
    """Of each optimizer the rate with the lowest loss."""
    return {kind: min(each, key=first_loss) for kind, each in by_optimizer(found).items()}


def milliseconds(variants: Sequence[Variant]) -> dict[str, str]:
    """Of a step of each, taken in turn: median and quartiles."""
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
        gap = f"{statistics.fmean(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f})"
        cells = [
            *(kind, each.name.rpartition(", ")[2], f"{kept:,}"),
            f"{kept / model_size(each.job):.2f}",
            *(times[each.name], str(len(losses))),
            f"{statistics.fmean(losses.values()):.3f}{deviation}",
            "" if each is base else gap,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return TABLE.format(rows="\n".join(rows))


def rates(found: Mapping[str, Variant]) -> str:
    """Every rate of every optimizer."""
    rows = []
    for kind, variants in by_optimizer(found).items():
        losses = (f"{v.name.rpartition(', ')[2]}: {first_loss(v):.3f}" for v in variants)
        rows.append(f"| {kind} | {', '.join(losses)} |")
    return RATES.format(rows="\n".join(rows))


def page(
    study: Study, found: Mapping[str, Variant], times: Mapping[str, str], plot: str, command: str
) -> str:
    base = found[study.baseline]
    environment = base.first.history.environment
    steps, tokens = base.first.all[-1]["step"], base.first.all[0]["tokens"]
    return PAGE.format(
        study=STUDY.relative_to(ROOT),
        command=command,
        device=environment.get("device"),
        torch=environment.get("torch"),
        python=environment.get("python"),
        cores=os.cpu_count(),
        date=time.strftime("%Y-%m-%d"),
        steps=steps,
        tokens=tokens,
        all_tokens=steps * tokens,
        parameters=model_size(base.job),
        outside=1 - model_size(base.job, "layers.") / model_size(base.job),
        last=LAST,
        base=base.name,
        seeds=len(base.losses),
        chance=max(base.losses.values()) - min(base.losses.values()),
        turns=TURNS,
        table=table(found, base, times),
        rates=rates(found),
        plot=plot,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="file for the page; the plot stands beside it")
    parser.add_argument("--docs", type=Path, help="page of the documentation that quotes the table")
    arguments = parser.parse_args()
    study = read_study(STUDY)
    found = finished(study)
    plot = arguments.output.with_suffix(".svg").name if arguments.output else "optimizers.svg"
    command = " ".join(["python", "benchmarks/optimizers.py", *sys.argv[1:]])
    times = milliseconds(list(best(found).values()))
    text = page(study, found, times, plot, command)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
        picture = draw(list(best(found).values()), "optimizer at its best rate")
        arguments.output.with_suffix(".svg").write_text(str(picture))
    if arguments.docs:
        quote("optimizers.py", table(found, found[study.baseline], times), arguments.docs)


if __name__ == "__main__":
    main()
