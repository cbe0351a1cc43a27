"""Trains a recipe and looks at every step: loss, gradient norm, each gradient and each weight.

One rank writes what it has to a folder; the ranks of a layout then compare what each of them holds
with its place in that. So an error is found on the rank that made it, no weight is sent, and copies
of a weight that should be the same are compared one by one.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan.build import Observer, Run, build
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.optim.group import local
from torchtitan.parallel import Launch, open_world
from torchtitan.torch_private.dtensor import local_extent
from torchtitan.trainer import Trainer

Row = dict[str, Any]
Kind = Literal["gradient", "weight"]

WEIGHT = 1e-5
"""How far a weight may be off."""
GRADIENT = 1e-3
"""How far a gradient may be off, in parts of the largest of its parameter."""


class Recorder:
    """A sink that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def open(self, start_step: int) -> None: ...

    def close(self, summary: Any) -> None: ...

    def write(self, step: int, metrics: Any) -> None:
        self.rows.append({"step": step, **metrics})


def training(job: JobConfig, device: Device, *, uneven: bool) -> Iterator[tuple[Run, Row]]:
    """Train on this rank's share of the world; after each step, the run and its row of metrics.

    `job.metrics.log_freq` is 1. With `uneven` the ranks get different numbers of targets.
    """
    launch = Launch.read()
    recorder = Recorder()
    observer = Observer(sinks=[recorder])
    if uneven:
        observer = dataclasses.replace(observer, on_microbatch=lambda batch: batch.uneven())
    with open_world(job.degrees(launch.size), job.comm, device) as world:
        run = build(job, world, observer)
        trainer = Trainer(run)
        with closing(run.batches), run.meter:
            for _ in range(job.training.steps):
                trainer.step()
                yield run, recorder.rows[-1]


@dataclass(frozen=True)
class Difference:
    """The element in which a weight or a gradient is farthest off."""

    kind: Kind
    name: str
    index: tuple[int, ...]
    found: float
    expected: float
    off: float
    """Absolute, or for a gradient in parts of the largest of its parameter."""

    @property
    def is_allowed(self) -> bool:
        return self.off <= (WEIGHT if self.kind == "weight" else GRADIENT)


@dataclass(frozen=True)
class Step:
    """What a rank found in one step."""

    loss: float
    grad_norm: float
    names: tuple[str, ...]
    """The parameters it has a part of, in the order of the model."""
    differences: tuple[Difference, ...] = ()
    """In its part of each gradient and each weight."""


def write_steps(job: JobConfig, folder: Path, at_step: Callable[[int], None]) -> list[Step]:
    """Train on one rank, and write what it has after each step to `folder`."""
    steps = []
    for run, row in _steps(job):
        tensors = {key: local(tensor).detach().clone() for key, tensor in _tensors(run, row)}
        torch.save(tensors, folder / f"{row['step']}.pt")
        steps.append(Step(row["loss"], row["grad_norm"], _names(run)))
        at_step(row["step"])
    return steps


def compare_steps(job: JobConfig, folder: Path, at_step: Callable[[int], None]) -> list[Step]:
    """Train on this rank's share of a layout, and compare each step with what is in `folder`."""
    steps = []
    for run, row in _steps(job):
        expected = torch.load(folder / f"{row['step']}.pt", mmap=True)
        differences = (difference(*key, t, expected[key]) for key, t in _tensors(run, row))
        found = tuple(difference for difference in differences if difference is not None)
        steps.append(Step(row["loss"], row["grad_norm"], _names(run), found))
        at_step(row["step"])
    return steps


def _steps(job: JobConfig) -> Iterator[tuple[Run, Row]]:
    logger.setLevel(logging.ERROR)  # this process is one of many, and has nothing else to say
    return training(job, Device("cpu"), uneven=True)


def _names(run: Run) -> tuple[str, ...]:
    return tuple(name for part in run.model.parts for name, _ in part.named_parameters())


def _tensors(run: Run, row: Row) -> Iterator[tuple[tuple[Kind, str], Tensor]]:
    """Each weight, and its gradient as it was before it was clipped."""
    limit = run.optimizers.max_norm
    scale = min(limit / (row["grad_norm"] + 1e-6), 1.0) if limit else 1.0
    for part in run.model.parts:
        for name, parameter in part.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield ("gradient", name), gradient / scale
            yield ("weight", name), parameter


@torch.no_grad()
def difference(kind: Kind, name: str, found: Tensor, whole: Tensor) -> Difference | None:
    """Where this rank's part of a tensor is farthest from its place in `whole`; None: no part."""
    from torch.distributed.tensor import DTensor

    offset = (0,) * found.ndim
    if isinstance(found, DTensor):
        _, offset = local_extent(found)
    part = local(found)
    if not part.numel():
        return None
    place = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
    off = (part - whole[place]).abs()
    at = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    index = tuple(o + i for o, i in zip(offset, at, strict=True))
    largest = whole.abs().max().item() if kind == "gradient" else 1.0
    return Difference(
        kind, name, index, part[at].item(), whole[index].item(), off[at].item() / (largest or 1.0)
    )
