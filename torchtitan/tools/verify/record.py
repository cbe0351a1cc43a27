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

from torchtitan.build import Observer, Run, build
from torchtitan.checkpoint import TrainState, saved_steps
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.data import Batch
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.optim.group import local
from torchtitan.parallel import Launch, World, open_world
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
        notes = Notes(world, at_step, reference, kill_after)
        notes.run = build(job, world, notes.observer())
        with closing(notes.run.batches):
            Trainer(notes.run).train(start)
    return notes.notes


def die() -> None:
    """End this process as the kernel does when memory runs out: nothing more is done."""
    os.kill(os.getpid(), signal.SIGKILL)


class Notes:
    """Makes a note at the start and after each step."""

    run: Run

    def __init__(
        self,
        world: World,
        at_step: Callable[[int], None],
        reference: Path | None,
        kill_after: int | None,
    ) -> None:
        self.world, self.at_step = world, at_step
        self.notes: list[Note] = []
        self.recorder = Recorder()
        self.hashes: list[int] = []
        """Of the samples of a step, as they were read."""
        self.saved = saved_steps(reference) if reference else {}
        self.kill_after = kill_after

    def observer(self) -> Observer:
        """What looks on for these notes."""
        return Observer(self.before_step, self.on_microbatch, self.after_step, [self.recorder])

    def before_step(self, step: int) -> None:
        if not self.notes:
            self.notes.append(self.note())
        self.hashes.clear()
        self.at_step(step)

    def on_microbatch(self, batch: Batch) -> Batch:
        for inputs, targets in zip(batch.inputs.numpy(), batch.targets.numpy(), strict=True):
            self.hashes.append(xxhash.xxh3_64_intdigest(inputs.tobytes() + targets.tobytes()))
        return batch

    def after_step(self, state: TrainState) -> None:
        row, mine = self.recorder.rows[-1], len(self.hashes)
        first = (state.step - 1) * mine * self.world.degrees.data + self.world.data_rank * mine
        samples = dict(enumerate(self.hashes, first))
        self.notes.append(self.note(row["loss"], row["grad_norm"], samples))
        if state.step == self.kill_after:
            self.run.checkpoint.finish()
            if self.world.rank == self.world.size - 1:
                die()

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
        has_rng = read_manifest(saved.checkpoint).ranks == self.world.size
        for name, tensor in self.run.checkpoint.contents.tensors().items():
            if has_rng or not name.startswith(("rng.", "communication.")):
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
