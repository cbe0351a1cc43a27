"""Train a few steps in a recipe's layout and on one rank, on the CPU, and compare them.

Both train the same steps in float32, on data with a different number of targets on each rank, so
that a mean of means would show. After each step, the loss, the gradient norm, each gradient and
each weight are compared. This is done first with SGD and then with the recipe's optimizer, because
the updates of Adam do not depend on the scale of a gradient and would hide an error in it.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from torchtitan.checks import load_job
from torchtitan.config import ConfigError, Registry, print_error, split_recipe
from torchtitan.job import JobConfig
from torchtitan.local_ranks import RanksFailed
from torchtitan.logging import make_console, on_terminal
from torchtitan.optim import SGD, GroupConfig, OptimizerConfig
from torchtitan.optim.adam_and_sgd import SGDGroup
from torchtitan.tools.options import Count, LayoutRanks, Recipe, RecipeVerb, Shrink, verb
from torchtitan.tools.verify.measure import (
    EXEMPT,
    Step,
    compare_steps,
    describe_ranks,
    problems_here,
    run,
    write_steps,
)
from torchtitan.tools.verify.recipe import Checked, derive_checked, use_float64
from torchtitan.tools.verify.report import Comparison, largest_weight

Reference = Callable[[JobConfig, JobConfig, int, Path, str], list[Step]]
"""(the run of one rank, that of the layout, its ranks, the folder for what it has after each step,
a name for messages) to the steps of a run to compare with."""

REFERENCES = Registry[Reference]("verify", {})
"""References, by name, for layouts that do not train the run of one rank.

Where ranks compress messages, the run is compared, to the same tolerances, with a simulation.
"""


app = verb()


@app.command(cls=RecipeVerb, help=__doc__)
def verify_parallelism(
    context: typer.Context,
    recipe: Recipe = None,
    world_size: LayoutRanks = None,
    steps: Annotated[int | None, Count("Number of optimizer steps (default: 5).")] = None,
    shrink: Shrink = False,
) -> int:
    path, flags = split_recipe([*([recipe] if recipe else []), *context.args])
    loaded = load_job(path, flags, world_size, "cuda", exempt=EXEMPT)
    checked = derive_checked(loaded, world_size=world_size, steps=steps, shrink=shrink)
    job, ranks = checked.job, checked.ranks
    console = make_console(width=None if on_terminal(sys.stdout) else 120, soft_wrap=True)
    # The file of one rank's weights and gradients after each step.
    replace(loaded, config=job).refuse(problems_here(job, ranks, 8 * job.training.steps))
    if not (checked.is_exact or "modelled" in REFERENCES):
        raise ConfigError(
            "communication: the ranks compress what they send, so this is not the run of one "
            "rank, and the simulation to compare it with is not installed; install all of "
            "torchtitan, or use uncompressed communication"
        )
    if not checked.is_exact and job.parallelism.balancing == "documents":
        raise ConfigError(
            "parallelism.context_parallel_load_balancer: the ranks compress what they send, and "
            'the simulation to compare them with cuts all rows alike; use "headtail" for this check'
        )
    layout = ", ".join(f"{axis} {size}" for axis, size in job.degrees(ranks)._asdict().items())
    console.print(f"{loaded.place} on {ranks} rank{'s' * (ranks > 1)}: {layout}")
    for loss in job.auxiliary_losses:
        console.print(f"auxiliary loss {loss.described()}")
    console.print("for this check:", *(f"  {line}" for line in checked.changes), sep="\n")
    off = 0.0
    for name, optimizer in _optimizers(job).items():
        try:
            found = _compare(checked, optimizer, name)
        except RanksFailed as error:
            print_error(f"no comparison: {error}")
            return 1
        console.print(found.table(f"\n{name}"))
        if fault := found.fault():
            console.print(f"\nFAIL: {name}, {fault}", style="bold red")
            return 1
        off = max(off, largest_weight(found.ranks))
    where = "on one rank" if checked.is_exact else "simulated in one process"
    count = job.training.steps
    said = f"{count} step{'s' * (count > 1)} {where} and on {ranks}"
    console.print(f"\nPASS: {said}; max weight difference {off:.0e}", style="bold green")
    return 0


def _optimizers(job: JobConfig) -> dict[str, OptimizerConfig]:
    """By the name under which they are reported."""
    own = job.optimizer
    shared = set(GroupConfig.model_fields)
    groups = [SGDGroup(**group.model_dump(include=shared)) for group in own.groups]
    same = {name: getattr(own, name) for name in ("weight_decay", "no_weight_decay_on")}
    return {
        "SGD with momentum": SGD(lr=0.1, momentum=0.9, groups=tuple(groups), **same),
        f"{own.name} of the recipe": own,
    }


def _compare(checked: Checked, optimizer: OptimizerConfig, name: str) -> Comparison:
    """Train on one rank, then in the layout."""
    one = checked.one.model_copy(update={"optimizer": optimizer})
    job = checked.job.model_copy(update={"optimizer": optimizer})
    what = f"{name} on {describe_ranks(checked.ranks)}"
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder)
        if checked.is_exact:
            (expected,) = run(write_steps, 1, one, given, what=f"{name} on one rank")
        else:
            one, job = use_float64(one), use_float64(job)
            expected = REFERENCES["modelled"](one, job, checked.ranks, given, name)
        found = run(compare_steps, checked.ranks, job, given, what=what)
    return Comparison(expected, found)
