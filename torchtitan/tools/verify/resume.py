"""Shows on a CPU that a recipe's run, killed and resumed, is the uninterrupted run.

A run of 2k steps is not interrupted. The same run is killed after it has saved step k: a rank
ends by SIGKILL, the others as their launcher would end them. It is resumed from what is on disk, in
its own layout, where every bit must be the same, and in another, where sums are added up in another
order. Loaded state, samples, losses, weights, optimizer and counters are compared step by step.
"""

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torchtitan.checks import load_job
from torchtitan.config import ConfigError, Problem, print_error
from torchtitan.job import JobConfig
from torchtitan.local_ranks import RanksFailed
from torchtitan.logging import make_console, on_terminal
from torchtitan.tools.verify.measure import WEIGHT, Step, compare_checkpoints
from torchtitan.tools.verify.ranks import EXEMPT, on_ranks, problems_here, run
from torchtitan.tools.verify.report import LOSS, Resumption
from torchtitan.tools.verify.resume_recipe import Resumed, as_resumed

CHECKPOINT_BYTES = 12
"""For each parameter: the weight and Adam's two moments."""


def verify_resume(
    path: str | None,
    flags: Sequence[str],
    *,
    world_size: int | None = None,
    steps: int | None = None,
    shrink: bool = False,
    then: Mapping[str, int] | None = None,
) -> bool:
    """Compare a run that is killed and resumed with one that is not, and print what is found.

    Args:
        world_size: ranks; absent: as few as show all of the layout.
        steps: k; it is killed after k steps were saved, of twice as many.
        shrink: make the model, its batches and its layout small first.
        then: sizes of the axes of the other layout it is resumed in; absent: one is chosen.

    Returns:
        Whether they are the same run.

    Raises:
        ConfigError: the recipe cannot be trained, or not here.
    """
    recipe = load_job(path, flags, world_size, "cuda", exempt=EXEMPT)
    asked = as_resumed(
        recipe, world_size=world_size, steps=steps, shrink=shrink, then=dict(then or {})
    )
    console = make_console(width=None if on_terminal(sys.stdout) else 120, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        replace(recipe, config=asked.job).refuse(_problems(asked.job, asked.ranks))
        then_job, then_ranks = asked.layouts[-1]
        if mistakes := list(_problems(then_job, then_ranks)):
            where = _where(then_job, then_ranks)
            lines = "".join(f"\n  {problem.path}: {problem.message}" for problem in mistakes)
            raise ConfigError(f"--then: the run cannot be resumed {where}:{lines}")
        console.print(f"{recipe.place} {_where(asked.job, asked.ranks)}")
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
                    return False
        except RanksFailed as error:
            print_error(f"no comparison: {error}")
            return False
    summary = (
        f"\nPASS: killed after step {trial.half} of {2 * trial.half} and resumed "
        f"{_where(asked.job, asked.ranks)}, to the bit"
    )
    if not found.is_exact:
        summary += (
            f"; {where}: max loss difference {found.largest_loss():.0e} (tolerance {LOSS:.0e}), "
            f"max weight difference {found.largest_weight():.0e} ({WEIGHT:.0e})"
        )
    console.print(summary, style="bold green")
    return True


def _problems(job: JobConfig, ranks: int) -> Iterator[Problem]:
    """Find problems of the recipe as it is resumed, including those of this machine."""
    # The uninterrupted run keeps every step; three others keep a few.
    return problems_here(job, ranks, CHECKPOINT_BYTES * (job.training.steps + 6))


def _where(job: JobConfig, ranks: int) -> str:
    sizes = job.degrees(ranks)._asdict().items()
    layout = ", ".join(f"{axis} {size}" for axis, size in sizes if size > 1)
    return f"on {on_ranks(ranks)}" + (f" ({layout})" if layout else "")


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
