"""Trains a recipe on forked ranks of this machine, on the CPU, and says what that takes."""

import importlib
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.sharedctypes import RawValue
from typing import Any, TypeVar

from torchtitan.checks import problems
from torchtitan.config import PlannedWorld, Problem
from torchtitan.device import GIB, Device
from torchtitan.inputs import problems_of_task
from torchtitan.job import JobConfig
from torchtitan.local_ranks import RanksFailed, run_ranks
from torchtitan.logging import progress_bar
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty, count_parameters

Result = TypeVar("Result")

# What need not be there for a recipe to be verified.
EXEMPT = (
    "model.tokenizer_path",
    "data.dataset_path",
    "checkpoint.initial_load_path",
    "validation.dataset_path",
    "metrics.enable_tensorboard",
    "metrics.enable_wandb",
)
RANK_GIB = 0.3
"""Memory of a process before it has a model."""
RUN_TIMEOUT = timedelta(minutes=10)


def problems_here(job: JobConfig, ranks: int, disk_bytes: int) -> Iterator[Problem]:
    """Problems of a recipe as it is verified, including those of this machine.

    Args:
        disk_bytes: what is written for each parameter.
    """
    found = problems(job, PlannedWorld(ranks, "cpu", is_here=True))
    yield from (problem for problem in found if problem.severity == "error")
    yield from problems_of_task(job)
    spec = MODELS[job.model.name]
    args = job.model_args()
    parameters = count_parameters(build_empty(spec.build, args, job.training.seq_len)).total
    # Weight, gradient and the optimizer's state, in float32.
    copies = max(2, job.parallelism.data_parallel_replicate_degree)
    state = job.optimizer.state_bytes(4)
    memory = parameters * (8 + state) * copies / GIB + ranks * RANK_GIB
    folder = tempfile.gettempdir()
    for needed, there, what in (
        (memory, Device("cpu").memory_capacity(), "of memory"),
        (parameters * disk_bytes / GIB, shutil.disk_usage(folder).free / GIB, f"in {folder}"),
    ):
        if needed > there:
            message = (
                f"checking its {parameters:,} parameters on {ranks} ranks takes "
                f"{math.ceil(needed)} GiB {what}, but only {there:.0f} are there; use --shrink"
            )
            yield Problem("model.flavor", message)


def on_ranks(count: int) -> str:
    """A number of ranks in words."""
    return "one rank" if count == 1 else f"{count} ranks"


def run(
    function: Callable[..., Result], ranks: int, job: JobConfig, *arguments: Any, what: str
) -> list[Result]:
    """`function(job, *arguments, at_step)` on forked ranks, with a progress bar on a terminal.

    Args:
        function: tells `at_step` the number of each step.
        what: what is done, for the bar and for errors.
    """
    for module in ("tensor", "fsdp", "pipelining", "checkpoint"):
        # A fork has what its parent imported, so the ranks need not import it each.
        importlib.import_module(f"torch.distributed.{module}")
    done = RawValue("q", 0)

    def at_step(number: int) -> None:
        done.value = number

    try:
        with progress_bar(what, job.training.steps) as show:
            every = (function, ranks, job, *arguments, at_step)
            return run_ranks(
                *every, timeout=RUN_TIMEOUT, meanwhile=lambda: show(completed=done.value)
            )
    except RanksFailed as error:
        raise RanksFailed(f"{what}: {error}", error.codes) from None
