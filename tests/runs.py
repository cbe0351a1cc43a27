"""Trains the tiny model, and reports what every layout must agree on.

Several runs in one set of ranks cost much less than a set for each. A machine on which scripts/gpu
runs may lack pytest.
"""

import json
import logging
import os
import shutil
import signal
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import tests.tiny  # noqa: F401  (a spawned rank knows the model by it)
from tests.ranks import run_ranks
from torchtitan.build import Observer, build, resume_policy
from torchtitan.checkpoint import ResumePoint, choose_together
from torchtitan.device import Device
from torchtitan.logging import logger
from torchtitan.optim.parameters import local
from torchtitan.parallel import Launch, open_world
from torchtitan.tools.verify.measure import training
from torchtitan.torch_private.dtensor import local_extent
from torchtitan.trainer import Trainer, choose


@dataclass
class Trace:
    """What a rank measured at each step of a run, and its part of the weights after each."""

    losses: list[float]
    grad_norms: list[float]
    weights: list[dict[str, "Part"]]


class Part(NamedTuple):
    """What a rank holds of a weight, and where in the whole it begins."""

    local: Tensor
    offset: tuple[int, ...]

    def of(self, other):
        """The same place of another rank's part, which is the whole."""
        place = zip(self.offset, self.local.shape, strict=True)
        return other.local[tuple(slice(begin, begin + size) for begin, size in place)]


def parts(run):
    """What this rank holds of all weights, and of buffers that are saved with them."""
    found = {}
    for name, p in (item for part in run.model.parts for item in part.state_dict().items()):
        offset = local_extent(p)[1] if isinstance(p, DTensor) else (0,) * p.ndim
        found[name] = Part(local(p).detach().cpu().clone(), offset)
    return found


def whole(tensor):
    """A copy of all of a tensor, on the CPU."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().clone()


def weights(run):
    """All weights of all ranks, on every rank."""
    return {name: whole(p) for part in run.model.parts for name, p in part.state_dict().items()}


def trace(job, uneven=False, device="cpu"):
    """Train every step of `job` on this rank's share of the world."""
    kind = Device("cpu") if device == "cpu" else Device("cuda", Launch.read().local_rank)
    result = Trace([], [], [])
    for run, row in training(job, kind, uneven=uneven):
        result.losses.append(row["loss"])
        result.grad_norms.append(row["grad_norm"])
        result.weights.append(parts(run))
    return result


def assert_complete(found, expected):
    """The ranks together hold every element of every weight."""
    for name, (weight, _) in expected.weights[0].items():
        seen = torch.zeros_like(weight, dtype=torch.bool)
        for part in (own.weights[0][name] for own in found if name in own.weights[0]):
            part.of(Part(seen, ())).fill_(True)
        assert seen.all(), name


def compare(found, expected, where, allowed=1e-5):
    """Losses, norms and weights are those of one rank, up to rounding."""
    assert len(found.losses) == len(expected.losses) > 1
    compare_steps(found, expected, where, allowed, range(len(expected.losses)))


def compare_steps(found, expected, where, allowed, steps):
    """The same after some of the steps, counted from 0."""
    for step in steps:
        loss, norm = expected.losses[step], expected.grad_norms[step]
        at, off = f"{where}, step {step + 1}", found.losses[step] - loss
        assert abs(off) <= 1e-5 * loss, f"{at}: the loss is off by {off}"
        off = found.grad_norms[step] - norm
        assert abs(off) <= 1e-4 * norm, f"{at}: the gradient norm is off by {off}"
        for name, part in found.weights[step].items():
            difference = part.of(expected.weights[step][name]) - part.local
            off = difference.abs().max().item() if part.local.numel() else 0.0
            assert off <= allowed, f"{at}: {name} is off by {off}"


def compare_routers(found, expected, where):
    """Routers moved as on one rank, relative to how far: by SGD, as their gradients say.

    Their gradients are small, so that one of another scale could hide among the weights.
    """
    for name in (name for name in found.weights[0] if ".router." in name):
        mine, one = ([trace.weights[step][name] for step in (0, -1)] for trace in (found, expected))
        first, last = (own.of(whole) for own, whole in zip(mine, one, strict=True))
        moved, off = last - first, last - first - (mine[1].local - mine[0].local)
        assert off.norm() <= 1e-3 * moved.norm(), f"{where}: {name} is off by {off.norm()}"


def compare_converted(found, expected, where, allowed=1e-5):
    """The first step is that of one rank, up to rounding, and all others are nearly.

    A value between two codes of few bits becomes the one or the other by the last bit of a sum, so
    that from some step on a gradient may differ by more than rounding, and AdamW turns that into as
    much as a whole step of a weight. What is left is small compared to what was learned since the
    first step, where a gradient that lacks a sum would change half of it or more.
    """
    compare_steps(found, expected, where, allowed, [0])
    assert len(found.losses) == len(expected.losses) > 1
    for step in range(1, len(expected.losses)):
        loss, norm = expected.losses[step], expected.grad_norms[step]
        assert abs(found.losses[step] - loss) <= 1e-3 * loss, where
        assert abs(found.grad_norms[step] - norm) <= 1e-2 * norm, where
        for name, part in found.weights[step].items():
            if name.endswith("router.bias"):
                continue  # by a whole step for each token that goes elsewhere
            whole = part.of(expected.weights[step][name])
            learned = (whole - part.of(expected.weights[0][name])).norm().item()
            off = (whole - part.local).norm().item()
            # The bias of keys has no gradient but for rounding.
            assert off <= 0.05 * learned + 1e-9, f"{where}, step {step + 1}: {name} is off by {off}"


@contextmanager
def world_of(job):
    """The world of a job, of which this is a rank on a CPU."""
    with open_world(job.degrees(Launch.read().size), job.comm, Device("cpu")) as world:
        yield world


@contextmanager
def running(job, **observer):
    """A run of this rank on a CPU, built for an observer; its data is closed at the end."""
    with world_of(job) as world:
        run = build(job, world, Observer(**observer))
        with closing(run.batches):
            yield run


def train_from_scratch(run):
    Trainer(run).train(ResumePoint(None))


def train_until_killed(job, step):
    """Train like `train`; the process is killed when this step begins."""

    def kill(now):
        if now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    with running(job, before_step=kill) as run:
        Trainer(run).train(choose(job))


def listening():
    """What this rank logs from now on, line by line."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return said


def train(job, look=weights):
    """Train as the entry point does, resuming if the recipe says so; the weights at the end."""
    with world_of(job) as world:
        start = choose_together(resume_policy(job), world)
        run = build(job.with_batch(world.degrees, start.global_batch), world)
        with closing(run.batches):
            Trainer(run).train(start)
        return look(run)


def train_each(jobs):
    """Train one after the other on the same ranks, which derive shardings once; the weights."""
    return [train(job) for job in jobs]


def rows(folder):
    """The lines of a run's metrics.jsonl, but for one of which only a part is written yet."""
    whole = (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def losses(folder):
    return {row["step"]: row["loss"] for row in rows(folder) if "loss" in row}


def off(found, expected):
    """The 2-norm of what weights are off, over that of how far they moved."""
    error = moved = 0.0
    for rank in found:
        for name, part in rank.weights[-1].items():
            first, last = (part.of(expected.weights[step][name]) for step in (0, -1))
            error += (part.local - last).square().sum().item()
            moved += (last - first).square().sum().item()
    return (error / moved) ** 0.5


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
        torch.testing.assert_close(losses(folder / name), whole, rtol=1e-5, atol=1e-12, msg=name)


class Operators(TorchDispatchMode):
    """As a context, counts the operators that torch runs within it, by name."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.counts[str(function)] += 1
        return function(*arguments, **(named or {}))
