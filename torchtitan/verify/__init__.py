"""Shows on a CPU that a recipe's layout trains the same run as one rank.

Both train the same few steps in float32, with as many targets from rank to rank as the data happens
to have, so that a mean of means is no mean. After each step the loss, the gradient norm, each
gradient and each weight are compared. This is done with the recipe's optimizer, and before that
with SGD: the update of Adam does not change with the scale of a gradient, and would hide an error
in it.
"""

import importlib
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

from torchtitan.checks import load_job, problems, problems_of_machine
from torchtitan.config import Problem
from torchtitan.device import GIB, Device
from torchtitan.job import JobConfig
from torchtitan.local_ranks import RanksFailed, run_ranks
from torchtitan.logging import on_terminal
from torchtitan.models import MODELS
from torchtitan.models.spec import ModelSpec, build_empty, count_parameters
from torchtitan.optim import SGD, OptimizerConfig
from torchtitan.train import problems_of_tokenizer
from torchtitan.verify.measure import Step, compare_steps, write_steps
from torchtitan.verify.recipe import Checked, as_checked
from torchtitan.verify.report import Comparison

# What need not be there for a layout to be checked.
SPARED = (
    "model.tokenizer_path",
    "data.dataset_path",
    "checkpoint.initial_load_path",
    "validation.dataset_path",
    "metrics.enable_tensorboard",
    "metrics.enable_wandb",
)
RANK_GIB = 0.3
"""What a process takes before it has a model."""
PATIENCE = timedelta(minutes=10)


def verify(
    path: str | None,
    flags: Sequence[str],
    *,
    world_size: int | None = None,
    steps: int | None = None,
    shrink: bool = False,
) -> bool:
    """Compare a recipe's layout with one rank, and print what is found.

    Args:
        world_size: ranks; absent: as few as show all of the layout.
        shrink: make the model, its batches and its layout small first.

    Returns:
        Whether they train the same run.

    Raises:
        ConfigError: the recipe cannot be trained, or not here.
    """
    from rich.console import Console

    recipe = load_job(path, flags, world_size, "cuda", spared=SPARED)
    checked = as_checked(recipe, world_size=world_size, steps=steps, shrink=shrink)
    job, ranks = checked.job, checked.ranks
    width = None if sys.stdout.isatty() else 120
    console = Console(width=width, highlight=False, markup=False, soft_wrap=True)
    with _known(checked.spec):
        replace(recipe, config=job).refuse(_problems(checked))
        layout = ", ".join(f"{axis} {size}" for axis, size in job.degrees(ranks)._asdict().items())
        console.print(f"{recipe.place} on {ranks} rank{'s' * (ranks > 1)}: {layout}")
        console.print("for this check:", *(f"  {line}" for line in checked.changes), sep="\n")
        off = 0.0
        for name, optimizer in _optimizers(job).items():
            try:
                found = _compare(checked, optimizer, name)
            except RanksFailed as error:
                print(f"no comparison: {error}", file=sys.stderr)
                return False
            console.print(found.table(f"\n{name}"))
            if fault := found.fault():
                console.print(f"\nanother run: {name}, {fault}", style="bold red")
                return False
            off = max(off, found.largest().off)
    said = f"{job.training.steps} steps on one rank and on {ranks}; weights are off by {off:.0e}"
    console.print(f"\nthe same run: {said} at most", style="bold green")
    return True


@contextmanager
def _known(spec: ModelSpec[Any]) -> Iterator[None]:
    """Meanwhile, and to the processes forked meanwhile, a model is what `spec` says."""
    before = MODELS[spec.name]
    MODELS[spec.name] = spec
    try:
        yield
    finally:
        MODELS[spec.name] = before


def _problems(checked: Checked) -> Iterator[Problem]:
    """What is wrong with the recipe as it is checked, if only for this machine."""
    job = checked.job
    yield from problems(job, checked.ranks, "cpu")
    yield from problems_of_machine(job, "cpu")
    yield from problems_of_tokenizer(job)
    args = checked.spec.flavors[job.model.flavor]
    empty = build_empty(checked.spec.build, args, job.training.seq_len)
    parameters = count_parameters(empty).total
    # Weight, gradient and Adam's two moments of 4 bytes each; then the file of one rank's weights
    # and gradients after each step.
    copies = max(2, job.parallelism.data_parallel_replicate_degree)
    memory = parameters * 16 * copies / GIB + checked.ranks * RANK_GIB
    disk = parameters * 8 * job.training.steps / GIB
    folder = tempfile.gettempdir()
    for needed, there, what in (
        (memory, Device("cpu").memory_capacity(), "of memory"),
        (disk, shutil.disk_usage(folder).free / GIB, f"in {folder}"),
    ):
        if needed > there:
            message = (
                f"checking its {parameters:,} parameters on {checked.ranks} ranks takes "
                f"{math.ceil(needed)} GiB {what}, and there are {there:.0f}; use --shrink"
            )
            yield Problem("model.flavor", message)


def _optimizers(job: JobConfig) -> dict[str, OptimizerConfig]:
    """By the name under which they are reported."""
    own = job.optimizer
    decay = {"weight_decay": own.weight_decay, "no_weight_decay_on": own.no_weight_decay_on}
    return {
        "SGD with momentum": SGD(lr=0.1, momentum=0.9, **decay),
        f"{own.name} of the recipe": own,
    }


def _compare(checked: Checked, optimizer: OptimizerConfig, name: str) -> Comparison:
    """Train on one rank, then in the layout."""
    for module in ("tensor", "fsdp", "pipelining"):
        # A fork has what its parent imported, so the ranks need not import it each.
        importlib.import_module(f"torch.distributed.{module}")
    one, job = (j.model_copy(update={"optimizer": optimizer}) for j in (checked.one, checked.job))
    with tempfile.TemporaryDirectory() as folder:
        (expected,) = _run(write_steps, 1, one, folder, f"{name} on one rank")
        found = _run(compare_steps, checked.ranks, job, folder, f"{name} on {checked.ranks} ranks")
    return Comparison(expected, found)


def _run(
    function: Callable[..., list[Step]], ranks: int, job: JobConfig, folder: str, what: str
) -> list[list[Step]]:
    """Train on forked ranks, with a progress bar on a terminal."""
    done = RawValue("q", 0)

    def at_step(number: int) -> None:
        done.value = number

    arguments = (function, ranks, job, Path(folder), at_step)
    try:
        with _bar(what, job.training.steps, lambda: done.value) as meanwhile:
            return run_ranks(*arguments, timeout=PATIENCE, meanwhile=meanwhile)
    except RanksFailed as error:
        raise RanksFailed(f"{what}: {error}") from None


@contextmanager
def _bar(what: str, steps: int, done: Callable[[], int]) -> Iterator[Callable[[], None]]:
    """On a terminal, a bar that the yielded function brings up to date."""
    if not on_terminal():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # It draws only when told: a thread, or a stream of its own, would not survive the fork.
    with Progress(
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        task = progress.add_task(what, total=steps)

        def show() -> None:
            progress.update(task, completed=done(), refresh=True)

        yield show
