"""Trains as the entry point does, and notes what a run is after each of its steps.

The run that is never stopped saves every step. Ranks of a run that was resumed then compare each
tensor that a checkpoint holds, or their part of it, with its place in that; so the layouts may
differ, and nothing is sent. Samples are told apart by a hash of their tokens.
"""

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from torchtitan.build import Run, build
from torchtitan.checkpoint import saved_steps
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.data import Batch
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.optim.group import local
from torchtitan.parallel import Launch, open_world
from torchtitan.tools.verify.measure import Recorder
from torchtitan.torch_private.dtensor import local_extent
from torchtitan.train import choose
from torchtitan.trainer import Trainer


@dataclass(frozen=True)
class Off:
    """The element in which a tensor is farthest from what it was in the run never stopped."""

    name: str
    index: tuple[int, ...]
    found: float
    expected: float
    off: float
    """Absolute for weights, else in parts of the tensor's largest element."""


@dataclass(frozen=True)
class Note:
    """What a rank has after a step; the first note is of what the run starts from."""

    step: int
    counters: Mapping[str, Any]
    """Those of the run, and where its data stands."""
    loss: float | None = None
    grad_norm: float | None = None
    samples: Mapping[int, int] = field(default_factory=dict)
    """The hash of each sample that this rank read in the step, by its number in the run."""
    names: tuple[str, ...] = ()
    """Of the tensors that were compared."""
    offs: tuple[Off, ...] = ()
    """Those that are not the same to the bit."""


def train_and_note(
    job: JobConfig,
    reference: Path | None,
    kill_after: int | None,
    at_step: Callable[[int], None],
) -> list[Note]:
    """Train on this rank's share of the world.

    Args:
        reference: checkpoints of every step of the run to compare with.
        kill_after: the step after which, once all is saved that should be, the last rank dies.
    """
    logger.setLevel(logging.ERROR)  # this process is one of many, and has nothing else to say
    launch = Launch.read()
    with open_world(job.degrees(launch.size), job.comm, Device("cpu")) as world:
        start = world.share(choose(job) if world.rank == 0 else None)
        run = build(job, world)
        trainer = Noting(run, at_step, reference, kill_after)
        with closing(run.data):
            trainer.train(start)
    return trainer.notes


def die() -> None:
    """End this process as the kernel does when memory runs out: nothing more is done."""
    os.kill(os.getpid(), signal.SIGKILL)


class Samples:
    """Hashes the samples of a stream as they are read."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.hashes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __next__(self) -> Batch:
        batch: Batch = next(self.stream)
        for tokens, targets in zip(batch.tokens.numpy(), batch.targets.numpy(), strict=True):
            self.hashes.append(xxhash.xxh3_64_intdigest(tokens.tobytes() + targets.tobytes()))
        return batch


class Noting(Trainer):
    """A trainer that makes a note at the start and after each step."""

    def __init__(
        self,
        run: Run,
        at_step: Callable[[int], None],
        reference: Path | None,
        kill_after: int | None,
    ) -> None:
        super().__init__(run, at_step)
        self.notes: list[Note] = []
        self.recorder = Recorder()
        run.meter.sinks = [self.recorder]
        self.samples = Samples(run.data)
        run.data = self.samples  # type: ignore[assignment]
        self.saved = saved_steps(reference) if reference else {}
        self.kill_after = kill_after

    def step(self) -> bool:
        """As any trainer, with notes."""
        state, world = self.run.state, self.run.world
        if not self.notes:
            self.notes.append(self.note())
        self.samples.hashes.clear()
        before = state.step
        stops = super().step()
        row = self.recorder.rows[-1]
        mine = len(self.samples.hashes)
        first = before * mine * world.degrees.data + world.data_rank * mine
        samples = dict(enumerate(self.samples.hashes, first))
        self.notes.append(self.note(row["loss"], row["grad_norm"], samples))
        if state.step == self.kill_after:
            self.run.checkpoint.finish()
            if world.rank == world.size - 1:
                die()
        return stops

    def note(
        self,
        loss: float | None = None,
        grad_norm: float | None = None,
        samples: Mapping[int, int] | None = None,
    ) -> Note:
        """What this rank has now."""
        run = self.run
        names, offs = [], []
        if path := self.saved.get(run.state.step):
            saved = SavedTensors(path)
            for name, tensor in self.comparable(saved):
                names.append(name)
                if off := farthest(name, tensor, saved):
                    offs.append(off)
        position = run.checkpoint.contents.position()
        counters = {
            f"train_state.{name}": value
            for name, value in position["train_state"].items()
            if isinstance(value, int)
        }
        data = position["data"]
        counters["data.samples"] = data["samples"]
        counters |= {f"data.lanes.{lane}": at for lane, at in enumerate(data["lanes"])}
        return Note(
            run.state.step, counters, loss, grad_norm, samples or {}, tuple(names), tuple(offs)
        )

    def comparable(self, saved: SavedTensors) -> Iterator[tuple[str, Tensor]]:
        """This rank's tensors; random numbers only where as many ranks draw them."""
        has_rng = read_manifest(saved.checkpoint).ranks == self.run.world.size
        for name, tensor in self.run.checkpoint.contents.tensors().items():
            if has_rng or not name.startswith("rng."):
                yield name, tensor


@torch.no_grad()
def farthest(name: str, tensor: Tensor, saved: SavedTensors) -> Off | None:
    """Where this rank's part of a tensor is farthest from its place in a checkpoint.

    None where they are the same to the bit.
    """
    from torch.distributed.tensor import DTensor

    offset: tuple[int, ...] = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        _, offset = local_extent(tensor)
    part = local(tensor).cpu()
    expected = saved.read(name, offset, part.shape).to(part.dtype)
    if torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (part, expected))):
        return None
    off = (part.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
    at = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    index = tuple(o + i for o, i in zip(offset, at, strict=True))
    largest = 1.0 if name.startswith("model.") else expected.double().abs().max().item()
    return Off(name, index, part[at].item(), expected[at].item(), off[at].item() / (largest or 1.0))
