"""What each way to send costs, saves and learns: a section for each study of them.

    study=communication  # or qsdp
    torchtitan compare train_configs/studies/${study}_debug.toml
    for seed in 1 2; do
        torchtitan compare train_configs/studies/${study}_debug.toml --debug.seed $seed \\
            --output outputs/studies/${study}_debug_seed_$seed
    done
    python benchmarks/communication.py $study --output benchmarks/results/communication.md

Comparisons make the runs, and go on where they were stopped; the last command reads those that are
there. The spread is the standard deviation over seeds, and the gap is taken seed by seed, since a
seed determines the data and the first weights.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

from quoted import write_section
from variants import ROOT, Variant, conditions, draw, finished, studies

from torchtitan.tools.compare.study import Study

PAGE = """\
## {title}

<!-- Written by benchmarks/communication.py. -->

A Llama of {parameters:,} parameters is trained for {steps} steps of {tokens} tokens on {ranks}
ranks over gloo, {about}

`torchtitan compare train_configs/studies/{name}_debug.toml`, then
`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}.
Variants ran one after another, so **other work on the machine changes their times**.

*MB sent* is by rank 0 in a step, by axis: counted, but for RTP's messages, which are planned.
*Loss* is the mean of the last {last} steps over the seeds, ± their standard deviation. *Gap* is the
loss minus that of {base} with the same seed: the mean and the range. *First steps*:
whether loss and gradient norm of the first ten are those of {base} within rounding, by the rule of
[compare](../../docs/compare.md).

{table}
![Loss at the end, by seed]({name}.svg)

Limits of this study:

- The bytes are exact, and do not depend on the machine.
- {seeds} seeds of {base} lie {chance:.3f} apart. Gaps are taken seed
  by seed, and so are far smaller. Where they have one sign for all seeds, they suggest an order;
  so few seeds do not prove it, and a gap with both signs shows nothing. {steps} steps of a model
  this small have mostly learned how often each byte occurs: a loss that rounding spoils late would
  not be seen.
- The memory is nearly all Python and torch. It shows neither the savings of sharding nor the errors
  that LoCo keeps.
{limits}"""
STUDIES = {
    "communication": {
        "title": "Every method",
        "about": """\
each with the learning rate that was best of 1e-3, 3e-3 and 1e-2: AdamW, and SGD by signs for
replicas that exchange a part of their momentum. (One seed of each, AdamW on one rank, the
others on two. 1e-3 was best for AdamW, 3e-3 for DeMo and 1e-2 for slices: those of AdamW and slices
are ends of the range, so a better one may be beyond it.)""",
        "limits": """\
- Replicas that exchange signs train with another optimizer, so their gap is also that of signed
  SGD, not only of the compression.
""",
    },
    "qsdp": {
        "title": "QSDP by bits",
        "about": """\
by AdamW at a learning rate of 1e-3. Weights, gradients or both are sent in fewer bits, in buckets
of 256 numbers. Learned levels are updated every 100 steps.""",
        "limits": "",
    },
}
"""What the page says of each study, by its name without `_debug`."""


TABLE = """\
| | MB sent | GiB | ms/step (IQR) | seeds | loss | gap | first steps |
|---|---|---:|---:|---:|---:|---:|---|
{rows}
"""


def table(found: Mapping[str, Variant], base: Variant) -> str:
    """A row for each variant."""
    rows = []
    for name, each in found.items():
        sent = ", ".join(f"{axis} {size / 1e6:.3f}" for axis, size in each.sent.items())
        losses = each.losses
        deviation = f" ± {statistics.stdev(losses.values()):.3f}" if len(losses) > 1 else ""
        gaps = [loss - base.losses[seed] for seed, loss in losses.items() if seed in base.losses]
        least_and_most = f" ({min(gaps):+.3f} to {max(gaps):+.3f})" if len(gaps) > 1 else ""
        is_base = each is base
        memory = max(run.memory_gib or 0.0 for run in each.runs.values())
        cells = [
            *(name, sent, f"{memory:.2f}", each.milliseconds, str(len(losses))),
            f"{statistics.fmean(losses.values()):.3f}{deviation}",
            "" if is_base else f"{statistics.fmean(gaps):+.3f}{least_and_most}",
            "" if is_base else each.parity(base),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return TABLE.format(rows="\n".join(rows))


def page(name: str, study: Study, found: Mapping[str, Variant], command: str) -> str:
    base = found[study.baseline]
    return PAGE.format(
        **STUDIES[name],
        **conditions(base),
        name=name,
        command=command,
        ranks=base.ranks,
        table=table(found, base),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", nargs="?", choices=STUDIES, default="communication")
    parser.add_argument("--output", type=Path, help="file for the page; the plot stands beside it")
    arguments = parser.parse_args()
    name = arguments.study
    study, *others = studies(ROOT / f"train_configs/studies/{name}_debug.toml")
    found = finished([study, *others])
    command = " ".join(["python", "benchmarks/communication.py", *sys.argv[1:]])
    text = page(name, study, found, command)
    print(text)
    if arguments.output:
        write_section(arguments.output, text)
        picture = draw(list(found.values()), "way to send")
        arguments.output.with_name(f"{name}.svg").write_text(str(picture))


if __name__ == "__main__":
    main()
