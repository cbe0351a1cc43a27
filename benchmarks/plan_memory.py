"""Planned memory beside what real steps of every layout and system allocate on this machine.

    python benchmarks/plan_memory.py --output benchmarks/results/plan_accuracy.md
    python benchmarks/plan_memory.py --only "FSDP 2" "PP 2, 1F1B"

Each layout of the parity tests, and each system, trains a few steps on gloo ranks, while torch's
memory tracker counts the bytes of all tensors of each rank.
"""

import argparse
import functools
import logging
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from quoted import write_section  # noqa: E402

from tests import layouts  # noqa: E402
from tests.parallel import test_muon  # noqa: E402
from tests.plan.real_memory import Peak, measured, planned  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.research import layouts as of_systems  # noqa: E402
from tests.research import (  # noqa: E402
    test_galore_parallel,
    test_low_bit_parallel,
    test_qk_clip_parallel,
    test_ranger21_parallel,
    test_recipes,
    test_vit_mae_layouts,
)
from tests.research import test_layouts as more_of_systems  # noqa: E402
from torchtitan.checks import load_job  # noqa: E402
from torchtitan.device import pick  # noqa: E402
from torchtitan.job import JobConfig  # noqa: E402
from torchtitan.parallel import CompileConfig  # noqa: E402

LIMIT = 0.02
"""Largest error of a plan that the page does not name."""
SHOWN = 0.001
"""Least error of a row of the table."""


class MemoryCase(NamedTuple):
    """Recipe, and the number of ranks that run it."""

    name: str
    job: Callable[[], JobConfig]
    ranks: int


class MemoryRow(NamedTuple):
    """Peaks of ranks; without plans, the reason."""

    name: str
    ranks: int
    measured: list[Peak]
    planned: list[Peak]
    seconds: float
    reason: str = ""

    @property
    def fullest(self) -> int:
        """Rank that allocates most."""
        return max(range(len(self.measured)), key=lambda rank: self.measured[rank].bytes)

    @property
    def errors(self) -> list[float]:
        """Errors of the plan of each rank."""
        pairs = zip(self.measured, self.planned, strict=True)
        return [plan.bytes / real.bytes - 1 for real, plan in pairs]

    @property
    def is_good(self) -> bool:
        """Whether peak and moment are right on all ranks."""
        pairs = zip(self.measured, self.planned, strict=True)
        moments = all(real.moment == plan.moment for real, plan in pairs)
        return moments and max(map(abs, self.errors)) <= LIMIT

    @property
    def is_shown(self) -> bool:
        """Whether a plan is off by enough, or there is none."""
        return not self.planned or max(map(abs, self.errors)) >= SHOWN

    def cells(self) -> list[str]:
        """Return the cells of the row in the table."""
        real = self.measured[self.fullest]
        start = [self.name, str(self.ranks), f"{real.bytes:,}"]
        if self.reason:
            return [*start, self.reason, "", "", real.moment, ""]
        plan = self.planned[self.fullest]
        worst = max(self.errors, key=abs)
        errors = [f"{round(each, 4) + 0.0:+.2%}" for each in (self.errors[self.fullest], worst)]
        return [*start, f"{plan.bytes:,}", *errors, real.moment, plan.moment]


CASES: dict[str, MemoryCase] = {}
"""All cases by name."""


def cases() -> Iterator[MemoryCase]:
    """Yield all layouts and systems."""
    parity = layouts.LAYOUTS | of_systems.LAYOUTS | more_of_systems.SENDING
    for name, layout in parity.items():
        yield MemoryCase(name, functools.partial(layouts.job, layout, "AdamW"), layout.ranks)
    for title, module, optimizer in (
        ("Muon", test_muon, {}),
        ("QK-clip", test_qk_clip_parallel, {}),
        ("Ranger21", test_ranger21_parallel, {"optimizer": test_ranger21_parallel.RANGER}),
        ("GaLore", test_galore_parallel, {}),
        ("ViT-MAE", test_vit_mae_layouts, {"optimizer": "AdamW"}),
    ):
        for name, layout in module.LAYOUTS.items():
            job = functools.partial(module.job, layout, **optimizer)
            yield MemoryCase(f"{title}: {name}", job, layout.ranks)
    for name, layout in test_low_bit_parallel.LAYOUTS.items():
        job = functools.partial(few_bits, layout)
        yield MemoryCase(f"Moments in 8 bits: {name}", job, layout.ranks)
    for name in test_recipes.SYSTEMS:
        ranks = test_recipes.RANKS[name]
        yield MemoryCase(f"{name}.toml", functools.partial(recipe, name, ranks), ranks)


def few_bits(layout: layouts.Case) -> JobConfig:
    """Return a recipe with the moments of Adam in 8 bits."""
    optimizer = {"state_dtype": "8bit"}
    return layouts.job(layout, "AdamW", model={"flavor": "square"}).model_copy(
        update={"optimizer": layouts.tiny.job(optimizer=optimizer).optimizer}
    )


def recipe(name: str, ranks: int) -> JobConfig:
    """Return the recipe of a system, of a small model."""
    path = test_recipes.FOLDER / f"{name}.toml"
    return load_job(path, test_recipes.SMALL, ranks, "cpu").config


def run(name: str) -> MemoryRow:
    """Measure a case on all ranks, and plan the fullest of each pipeline rank."""
    started = time.perf_counter()
    case = CASES[name]
    job = case.job()
    training = job.training.model_copy(update={"steps": 4})
    job = job.model_copy(update={"training": training, "compile": CompileConfig()})
    torch.compiler.set_stance("force_eager")  # the tracker does not see what is compiled
    real = run_ranks(measured, case.ranks, job)
    each = case.ranks // job.degrees(case.ranks).pp
    firsts = range(0, case.ranks, each)
    chosen = [max(range(n, n + each), key=lambda rank: real[rank].bytes) for n in firsts]
    reason, plans = "", []
    try:
        plans = [planned(job, case.ranks, rank) for rank in chosen]
    except RuntimeError as error:  # of fake tensors, which have no values
        reason = f"cannot be planned: {type(error).__name__}"
    found = [real[rank] for rank in chosen]
    return MemoryRow(name, case.ranks, found, plans, time.perf_counter() - started, reason)


PAGE = """\
## Planned memory beside that of real steps

<!-- Written by benchmarks/plan_memory.py. -->

Bytes of all tensors of a rank at the peak of a step: *measured* by torch's memory tracker on gloo
ranks of this machine, which counts each storage once, and *planned* by `torchtitan plan` for a CPU.
Of the ranks of each pipeline rank, the one that allocates most is planned. *Error* is that of the
fullest of all, and *largest* that of any plan. Peaks are in the forward, the backward or the
update. Models are small, so that data and other small tensors count for more than in training.
Nothing is compiled in either. The table has the layouts with an error of {shown:.1%} or more.

`{command}`: {device}, {cores} cores, torch {torch}, Python {python}, {date}.

{summary}

| layout | ranks | measured, bytes | planned, bytes | error | largest | measured at | planned at |
|---|---:|---:|---:|---:|---:|---|---|
{rows}
"""


def summary(rows: list[MemoryRow]) -> str:
    """Return the errors of all rows in a few sentences."""
    planned = [row for row in rows if row.planned]
    errors = [abs(each) for row in planned for each in row.errors]
    bad = [row.name for row in planned if not row.is_good]
    lines = [
        f"Plans of {len(errors):,} ranks of {len(planned)} recipes: the median of the errors is "
        f"{statistics.median(errors):.2%}, the largest {max(errors):.2%}.",
        f"All peaks are within {LIMIT:.0%} and at the moment that was planned"
        + (", but for:\n" if bad else "."),
        *(f"- {name}" for name in bad),
    ]
    if left := [row.name for row in rows if not row.planned]:
        lines += ["", "Recipes that cannot be planned:", "", *(f"- {name}" for name in left)]
    return "\n".join(lines)


def main() -> None:
    """Measure and plan, row by row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of layouts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at a time")
    parser.add_argument("--output", type=Path, help="file for the page")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    CASES.update({case.name: case for case in cases()})
    chosen = [name for name in CASES if not arguments.only or name in arguments.only]
    rows = []
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(arguments.jobs, context) as pool:
        for number, row in enumerate(pool.map(run, chosen), start=1):
            rows.append(row)
            line = " | ".join(row.cells())
            print(
                f"{number}/{len(chosen)} ({row.seconds:.0f} s) {line}", file=sys.stderr, flush=True
            )
    page = PAGE.format(
        command=shlex.join(["python", "benchmarks/plan_memory.py", *sys.argv[1:]]),
        device=pick().name,
        cores=os.cpu_count(),
        torch=torch.__version__,
        python=platform.python_version(),
        date=time.strftime("%Y-%m-%d"),
        summary=summary(rows),
        shown=SHOWN,
        rows="\n".join(f"| {' | '.join(row.cells())} |" for row in rows if row.is_shown),
    )
    print(page)
    if arguments.output:
        write_section(arguments.output, page)


if __name__ == "__main__":
    main()
