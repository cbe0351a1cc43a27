"""Several runs in one set of ranks, which costs much less than a set for each."""

import shutil
from typing import TypeVar

import pytest
import torch

from tests.ranks import run_ranks
from tests.runs import assert_complete, compare, losses, trace, train

Found = TypeVar("Found")


@pytest.fixture
def uncompiled():
    """Nothing is compiled here, and in ranks that are forked."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def each(function, settings, *more):
    """A function of each of the settings, on this rank, one after the other."""
    return [function(one, *more) for one in settings]


def traced(layout, jobs, uneven=False):
    """A run of each job: of each of them, that of each rank."""
    ranks = run_ranks(each, layout.ranks, trace, jobs, uneven)
    return [list(of_job) for of_job in zip(*ranks, strict=True)]


_ALONE = {}


def on_one_rank(jobs):
    """A run of each job, which is made once."""
    key = "\n".join(job.model_dump_json() for job in jobs)
    if key not in _ALONE:
        (_ALONE[key],) = run_ranks(each, 1, trace, jobs, True)
    return _ALONE[key]


def are_the_runs_of_one_rank(layout, jobs, alone, allowed=1e-5):
    """Each job, on a layout, is the run of its fellow on one rank."""
    found = zip(jobs, traced(layout, jobs, True), on_one_rank(alone), strict=True)
    for number, (job, ranks, expected) in enumerate(found):
        assert_complete(ranks, expected)
        for rank, own in enumerate(ranks):
            compare(own, expected, f"run {number}, {job.optimizer.name}, rank {rank}", allowed)


def resumes(made, folder, first, others, half, steps, allowed):
    """A run that stops resumes to the bit on its layout, and nearly so on others of its size."""
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
