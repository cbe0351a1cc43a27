"""Loss and balance of the study of experts, by seed: a page from its finished runs.

    torchtitan compare train_configs/studies/experts_debug.toml
    python benchmarks/expert_balance.py outputs/studies/experts_debug \\
        --output benchmarks/results/expert_balance.md --docs docs/experts.md

The loss is that of the task, the mean of the last 30 steps; differences to the dense model are of
runs with the same seed, which have the same data.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from quoted import quote

from torchtitan.tools.history import RunHistory

LAST = 30
"""Steps whose mean is the value of a run."""

PAGE = """\
# Mixtures of experts: balance, and a dense model of equal FLOPs

<!-- Written by benchmarks/expert_balance.py. -->

`{command}`: {device}, torch {torch}, Python {python}, {created}; the machine had other work.

{steps} steps of 1,024 tokens of the standard library's text with a small Qwen3 (4 layers, dim 96):
dense with a feed-forward of width 256, or with 8 experts of width 128, of which a token has 2. So a
token costs as much, but for the router. Each is run with seeds {seeds}. The loss is that of the
task, without the weighted loss of balance; the difference is to the dense model with the same seed;
entropy and the share of the busiest expert are as in the metrics (uniform: 1, and 12.5%). All are
means of the last {last} steps: the median (lowest to highest) of the seeds.

{table}
"""


def value(history: RunHistory, key: str) -> float | None:
    """The mean over the last steps."""
    found = [row[key] for row in history.reports[-LAST:] if row.get(key) is not None]
    return statistics.fmean(found) if found else None


def loss(history: RunHistory) -> float:
    """The loss of the task."""
    weight = history.recipe.get("auxiliary_losses.0.weight", 0.0)
    total, balance = value(history, "loss"), value(history, "loss/load_balance")
    assert total is not None
    return total - weight * (balance or 0.0)


def several(values: list[float | None], style: str) -> str:
    """The median of the seeds, and the extremes."""
    known = [each for each in values if each is not None]
    if not known:
        return "-"
    low, high = min(known), max(known)
    return f"{statistics.median(known):{style}} ({low:{style}} to {high:{style}})"


def main() -> None:
    """Read the runs, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="output of torchtitan compare")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--docs", type=Path, help="page with a place for the table")
    arguments = parser.parse_args()
    report: dict[str, Any] = json.loads((arguments.folder / "report.json").read_text())
    runs = {
        each["name"]: {
            run["seed"]: RunHistory.open(arguments.folder / run["folder"]) for run in each["runs"]
        }
        for each in report["variants"]
    }
    dense = {seed: loss(history) for seed, history in runs[report["baseline"]].items()}
    lines = ["| | loss | to dense | entropy | busiest expert |", "|---|---|---|---|---|"]
    for name, by_seed in runs.items():
        losses = {seed: loss(history) for seed, history in by_seed.items()}
        cells = [
            several([*losses.values()], ".3f"),
            "-" if losses == dense else several([x - dense[s] for s, x in losses.items()], "+.3f"),
            several([value(h, "experts/entropy") for h in by_seed.values()], ".3f"),
            several([value(h, "experts/busiest_share") for h in by_seed.values()], ".1%"),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    machine, conditions = report["machine"], report["conditions"]
    page = PAGE.format(
        command="python benchmarks/expert_balance.py outputs/studies/experts_debug",
        device=machine["device"],
        torch=machine["torch"],
        python=machine["python"],
        created=report["created"][:10],
        steps=conditions["warmup_steps"] + conditions["steps"],
        seeds=", ".join(map(str, sorted(dense))),
        last=LAST,
        table="\n".join(lines),
    )
    arguments.output.write_text(page, encoding="utf-8")
    if arguments.docs:
        quote("expert_balance.py", "\n".join(lines), arguments.docs)


if __name__ == "__main__":
    main()
