"""Kill a run on the CPU, resume it in the same and another layout, and compare each with no kill.

One run of 2k steps is uninterrupted. The same run is killed after it has saved step k: one rank by
SIGKILL, the others as their launcher would stop them. It is then resumed from the disk in the same
layout, where every bit must be equal, and in another, where sums are rounded differently. Loaded
state, samples, losses, weights, optimizer state and counters are compared step by step.
"""

import math
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from torchtitan import config
from torchtitan.checks import load_job
from torchtitan.config import ConfigError, Problem, print_error, split_recipe
from torchtitan.job import JobConfig
from torchtitan.local_ranks import RanksFailed
from torchtitan.logging import make_console, on_terminal
from torchtitan.parallel import Degrees, ParallelismConfig
from torchtitan.tools.options import Count, LayoutRanks, Recipe, RecipeVerb, Shrink, Text, verb
from torchtitan.tools.verify.measure import (
    EXEMPT,
    WEIGHT,
    Step,
    compare_checkpoints,
    describe_ranks,
    problems_here,
    run,
)
from torchtitan.tools.verify.recipe import Draft, make_ready, make_short
from torchtitan.tools.verify.report import LOSS, Resumption, largest_weight


@dataclass(frozen=True)
class Resumed:
    """A run of 2k steps, saved after k, and the same in another layout."""

    job: JobConfig
    ranks: int
    then: JobConfig
    then_ranks: int
    changes: list[str]

    @property
    def layouts(self) -> tuple[tuple[JobConfig, int], ...]:
        """In which it is resumed: its own first."""
        own, other = (self.job, self.ranks), (self.then, self.then_ranks)
        return (own,) if self.job.optimizer.rounds_state else (own, other)


def derive_resumed(
    recipe: config.Recipe[JobConfig],
    *,
    world_size: int | None,
    steps: int | None,
    shrink: bool,
    then: Mapping[str, int],
) -> Resumed:
    """Derive the recipe that is run and resumed.

    Args:
        steps: number of steps before the save; the run has twice as many.
        then: sizes of the axes of the other layout; empty: parameters split over half of the
            ranks, or over two.
    """
    draft = Draft(recipe)
    make_short(draft, steps and 2 * steps, 6)
    own = recipe.config.checkpoint
    draft.tree["checkpoint"] = {
        "enable": True,
        "interval": max(draft.job.training.steps // 2, 1),
        "resume": "must",
        "async_mode": own.async_mode,
    }
    draft.changes.append(
        f'checkpoints: in a separate folder, with async_mode = "{own.async_mode}" as in the '
        "recipe; no metrics, no profile, no validation"
    )
    ranks = make_ready(draft, world_size, shrink, parallelism(Degrees(**then)))
    if draft.job.optimizer.rounds_state:
        keys = [f"optimizer.{key}" for key in draft.job.optimizer.rounded_by]
        why = f"layouts round the optimizer's states differently ({', '.join(keys)})"
        if then:
            flags = " ".join(f"--{key} parameter" for key in keys)
            raise ConfigError(f"--then: {why}; add {flags}")
        draft.changes.append(f"resumed in the same layout only: {why}")
    degrees = Degrees(**(then or {"dp_shard": ranks // 2 if ranks > 1 else 2}))
    other = change_layout(draft.job, ranks, degrees)
    return Resumed(draft.job, ranks, other, math.prod(degrees), draft.changes)


def change_layout(job: JobConfig, ranks: int, degrees: Degrees) -> JobConfig:
    """The run of `job`, which is on `ranks`, in another layout; in no larger microbatches."""
    batch, local = job.global_batch(job.degrees(ranks)), job.training.local_batch_size
    fits = [n for n in range(1, batch + 1) if batch % (n * degrees.data) == 0]
    # A pipeline is filled by one large batch, not by several small ones.
    small = [n for n in fits if n <= local and degrees.pp == 1]
    size = max(small or fits, default=local)
    training = {"global_batch_size": batch, "local_batch_size": size}
    return job.model_copy(
        update={
            "training": job.training.model_copy(update=training),
            "parallelism": parallelism(degrees),
        }
    )


def parallelism(degrees: Degrees) -> ParallelismConfig:
    """A layout by the sizes of its axes, all else by default."""
    return ParallelismConfig(
        pipeline_parallel_degree=degrees.pp,
        data_parallel_replicate_degree=degrees.dp_replicate,
        data_parallel_shard_degree=degrees.dp_shard,
        context_parallel_degree=degrees.cp,
        tensor_parallel_degree=degrees.tp,
    )


def read_layout(words: str) -> dict[str, int]:
    """Sizes of axes, written as `tp=2,dp_shard=2`."""
    sizes: dict[str, int] = {}
    for word in words.split(","):
        axis, _, size = word.strip().partition("=")
        if axis not in Degrees._fields or not size.isdecimal() or int(size) < 1:
            axes = ", ".join(Degrees._fields)
            raise ConfigError(f"--then-layout: got {word!r}; wanted axis=size, with axes {axes}")
        sizes[axis] = int(size)
    return sizes


CHECKPOINT_BYTES = 12
"""For each parameter: the weight and Adam's two moments."""


app = verb()


@app.command(cls=RecipeVerb, help=__doc__)
def verify_resume(
    context: typer.Context,
    recipe: Recipe = None,
    world_size: LayoutRanks = None,
    then: Annotated[
        int | None,
        Count("Number of ranks to resume on, with FSDP (default: half of the ranks, or 2)."),
    ] = None,
    then_layout: Annotated[
        str | None, Text("AXES", "Other layout to resume in: tp=2,dp_shard=2.")
    ] = None,
    steps: Annotated[
        int | None, Count("Number of steps before the kill, and after it (default: 3).")
    ] = None,
    shrink: Shrink = False,
) -> int:
    if then and then_layout:
        raise typer.BadParameter("--then and --then-layout both name a layout; keep one")
    path, flags = split_recipe([*([recipe] if recipe else []), *context.args])
    layout = read_layout(then_layout) if then_layout else {"dp_shard": then} if then else {}
    loaded = load_job(path, flags, world_size, "cuda", exempt=EXEMPT)
    asked = derive_resumed(loaded, world_size=world_size, steps=steps, shrink=shrink, then=layout)
    console = make_console(width=None if on_terminal(sys.stdout) else 120, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        replace(loaded, config=asked.job).refuse(_problems(asked.job, asked.ranks))
        then_job, then_ranks = asked.layouts[-1]
        if mistakes := list(_problems(then_job, then_ranks)):
            where = _where(then_job, then_ranks)
            lines = "".join(f"\n  {problem.path}: {problem.message}" for problem in mistakes)
            raise ConfigError(f"--then: the run cannot be resumed {where}:{lines}")
        console.print(f"{loaded.place} {_where(asked.job, asked.ranks)}")
        console.print("for this check:", *(f"  {line}" for line in asked.changes), sep="\n")
        trial = Trial(asked, Path(folder))
        try:
            whole = trial.uninterrupted()
            trial.killed()
            for number, (job, ranks) in enumerate(asked.layouts):
                where = _where(job, ranks)
                resumed = trial.resumed(job, ranks, f"resumed-{number}")
                found = Resumption(whole, resumed, trial.half, is_exact=not number)
                title = f"killed after step {trial.half} was saved, resumed {where}"
                console.print(found.table(f"\n{title}"))
                if fault := found.fault():
                    console.print(f"\nFAIL: resumed {where}, {fault}", style="bold red")
                    return 1
        except RanksFailed as error:
            print_error(f"no comparison: {error}")
            return 1
    summary = (
        f"\nPASS: killed after step {trial.half} of {2 * trial.half} and resumed "
        f"{_where(asked.job, asked.ranks)}, to the bit"
    )
    if not found.is_exact:
        summary += (
            f"; {where}: max loss difference {found.largest_loss():.0e} (tolerance {LOSS:.0e}), "
            f"max weight difference {largest_weight(found.resumed):.0e} ({WEIGHT:.0e})"
        )
    console.print(summary, style="bold green")
    return 0


def _problems(job: JobConfig, ranks: int) -> Iterator[Problem]:
    """Find problems of the recipe as it is resumed, including those of this machine."""
    # The uninterrupted run keeps every step; three others keep a few.
    return problems_here(job, ranks, CHECKPOINT_BYTES * (job.training.steps + 6))


def _where(job: JobConfig, ranks: int) -> str:
    sizes = job.degrees(ranks)._asdict().items()
    layout = ", ".join(f"{axis} {size}" for axis, size in sizes if size > 1)
    return f"on {describe_ranks(ranks)}" + (f" ({layout})" if layout else "")


class Trial:
    """The runs that are made, in a folder."""

    def __init__(self, asked: Resumed, folder: Path) -> None:
        self.asked, self.folder = asked, folder
        self.half = asked.job.checkpoint.interval

    def uninterrupted(self) -> list[list[Step]]:
        """All steps, of which each is saved, for the others to be compared with."""
        every = {"interval": 1, "keep_latest_k": 0, "async_mode": "disabled", "resume": "auto"}
        job, ranks = self._in("whole", self.asked.job, **every), self.asked.ranks
        return run(compare_checkpoints, ranks, job, None, None, what="the uninterrupted run")

    def killed(self) -> None:
        """The same until one step after the save."""
        job, ranks = self._in("killed", self.asked.job, resume="auto"), self.asked.ranks
        what = "the killed run"
        try:
            run(compare_checkpoints, ranks, job, None, self.half + 1, what=what)
        except RanksFailed as error:
            if error.codes[-1] != -signal.SIGKILL:
                raise
            return
        raise RanksFailed(f"{what}: it was not killed")

    def resumed(self, job: JobConfig, ranks: int, name: str) -> list[list[Step]]:
        """Resume the killed run from its folder."""
        shutil.copytree(self.folder / "killed", self.folder / name)
        job, whole = self._in(name, job), self.folder / "whole" / job.checkpoint.folder
        what = f"the run resumed {_where(job, ranks)}"
        return run(compare_checkpoints, ranks, job, whole, None, what=what)

    def _in(self, name: str, job: JobConfig, **checkpoint: object) -> JobConfig:
        dump_folder = str(self.folder / name)
        return job.model_copy(
            update={
                "job": job.job.model_copy(update={"dump_folder": dump_folder}),
                "checkpoint": job.checkpoint.model_copy(update=checkpoint),
            }
        )
