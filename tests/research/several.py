"""Several runs in one set of ranks, which costs much less than a set for each."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.layouts import Case
from tests.ranks import run_ranks
from tests.runs import Trace, losses, trace, train
from torchtitan.job import JobConfig

Found = TypeVar("Found")


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Nothing is compiled here, and in ranks that are forked."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def each(function: Callable[..., Found], settings: Sequence[Any], *more: Any) -> list[Found]:
    """A function of each of the settings, on this rank, one after the other."""
    return [function(one, *more) for one in settings]


def traced(layout: Case, jobs: Sequence[JobConfig], uneven: bool = False) -> list[list[Trace]]:
    """A run of each job: of each of them, that of each rank."""
    ranks = run_ranks(each, layout.ranks, trace, jobs, uneven)
    return [list(of_job) for of_job in zip(*ranks, strict=True)]


def resumes(
    made: Callable[[Path, Case, int], JobConfig],
    folder: Path,
    first: Case,
    others: dict[str, Case],
    half: int,
    steps: int,
    allowed: float,
) -> None:
    """A run that stops resumes to the bit on its layout, and nearly so on others of its size.

    Args:
        made: of a folder, a layout and a number of steps, the recipe.
        half: after how many of all steps it stops.
        allowed: how far weights may be off that went on in another layout.
    """
    jobs = [made(folder / "whole", first, steps), made(folder / "same", first, half)]
    expected = run_ranks(each, first.ranks, train, jobs)[0][0]
    for name in others:
        shutil.copytree(folder / "same", folder / name)
    layouts = {"same": first, **others}
    jobs = [made(folder / name, layout, steps) for name, layout in layouts.items()]
    for rank in run_ranks(each, first.ranks, train, jobs):
        for name, weights in zip(layouts, rank, strict=True):
            for parameter, weight in weights.items():
                off = (weight - expected[parameter]).abs().max()
                assert off <= (0 if name == "same" else allowed), f"{name}: {parameter}"
    whole = losses(folder / "whole")
    assert losses(folder / "same") == whole
    for name in others:
        assert losses(folder / name) == pytest.approx(whole, rel=1e-5), name
