"""Model, in one process, of a run with inexact communication between ranks.

Such a run does not equal that of one rank. It equals that of a single process that keeps the state
of each rank: it computes the gradient of each rank's samples separately, and passes them to one
communication object per rank (`threads`). The layout itself is not involved, no sharding, no hooks
and no pipeline; the model knows only the pieces of parameters of each rank, the units that are sent
together, and the samples that a rank reads.

Both compute in float64. In float32 sums depend on their order, and if that moves a number from one
code to the next, the error is a whole unit.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from torchtitan.build import Run, build
from torchtitan.comm import Reduce, Unit
from torchtitan.data import Batch
from torchtitan.device import Device
from torchtitan.inputs import open_stream, open_task
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.parallel import Degrees, Launch, build_on_meta, open_world
from torchtitan.parallel.context_pieces import Cut
from torchtitan.research.common.threads import ThreadGroup, collectives, together
from torchtitan.timeline import Timeline
from torchtitan.tools.verify.measure import AtStep, Step, describe_ranks, hide_targets
from torchtitan.tools.verify.measure import run as fork
from torchtitan.torch_private.dtensor import is_dtensor, local_extent

Tensors = dict[str, Tensor]
CPU = Device("cpu")


@dataclass(frozen=True)
class Box:
    """Part of a parameter that a rank has."""

    begins: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of the whole parameter."""
        places = zip(self.begins, self.sizes, strict=True)
        return whole[tuple(slice(begin, begin + size) for begin, size in places)]


@dataclass(frozen=True)
class MeshPosition:
    """Place of a rank in a layout: its position on the mesh, and its parts of parameters."""

    stage: int
    replica: int
    shard: int
    """Index among the ranks that share parameters: dp_shard, then cp."""
    tensor: int
    boxes: Mapping[str, Box]
    """Parts of parameters, by name."""
    units: Sequence[Unit]
    """Units that are sent together; empty if nothing is sent in low bits."""


def modelled_steps(
    one: JobConfig, job: JobConfig, ranks: int, folder: Path, name: str
) -> list[Step]:
    """Train a model of `job` on `ranks` ranks in one process, as `write_steps` trains one rank.

    Args:
        one: the run of one rank.
        name: name of the optimizer, for messages.
    """
    layout = fork(places, ranks, job, what=f"the layout {name} on {describe_ranks(ranks)}")
    model = (write_modelled_steps, 1, one, job, layout, folder)
    (steps,) = fork(*model, what=f"{name}, modelled")
    return steps


def places(job: JobConfig, at_step: AtStep) -> MeshPosition:
    """Return the place of this rank in the layout of `job`."""
    found: list[Unit] = []
    way = job.communication.gradients
    open_way = type(way).open

    def record(config: Any, unit: Unit, group: Any) -> Reduce:
        found.append(unit)
        return open_way(config, unit, group)

    logger.setLevel(logging.ERROR)  # as `train` does
    launch = Launch.read()
    with ExitStack() as stack:
        world = stack.enter_context(open_world(job.degrees(launch.size), job.comm, CPU))
        stack.enter_context(patch.object(type(way), "open", record))
        layout, timeline = job.layout(world.degrees), Timeline(world.device)
        model = build_on_meta(job.model, job.model_args(), layout, world, timeline)
        boxes = {}
        for name, p in (named for part in model.parts for named in part.named_parameters()):
            extent = local_extent(p) if is_dtensor(p) else (p.shape, (0,) * p.ndim)
            boxes[name] = Box(tuple(extent[1]), tuple(extent[0]))
        axes = ("pp", "dp_replicate", "fsdp", "tp")
        stage, replica, shard, tensor = (world.groups[axis].rank() for axis in axes)
        units = found if world.degrees.fsdp > 1 else ()
    return MeshPosition(stage, replica, shard, tensor, boxes, units)


class ModelledRank:
    """State of a rank."""

    def __init__(
        self,
        position: MeshPosition,
        job: JobConfig,
        device: torch.device,
        sharing: ThreadGroup,
        copies: ThreadGroup,
    ) -> None:
        """
        Args:
            sharing: ranks that share the parameters of this one's replica.
            copies: ranks that have the same parts in other replicas.
        """
        self.position, self.boxes = position, position.boxes
        self.sharing, self.copies = sharing, copies
        ways = job.communication
        shared: Any = sharing
        copied: Any = copies
        self.units = [unit._replace(device=device) for unit in position.units]
        self.gathers = [ways.weights.open(unit, shared) for unit in self.units]
        self.reduces = [ways.gradients.open(unit, shared) for unit in self.units]
        shapes = {name: torch.Size(box.sizes) for name, box in self.boxes.items()}
        agrees = copies.size() > 1 and ways.replicas.steps_apart is not None
        is_open = agrees and not ways.replicas.in_backward
        self.reducer = ways.replicas.open(Unit("", shapes, device), copied) if is_open else None
        self.gradients: Tensors = {}
        """Gradients of its pieces in this step."""

    def gather(self, weights: Tensors) -> list[Tensor]:
        """Return the rows (ranks, elements) of each unit as all ranks send them."""
        wholes = []
        for unit, gather in zip(self.units, self.gathers, strict=True):
            row = self.row(unit, weights)
            whole = row.new_empty(self.sharing.size() * len(row))
            gather(whole, row)
            wholes.append(whole.view(-1, len(row)))
        return wholes

    def reduce(self, group: Sequence["ModelledRank"], gradients: Sequence[Tensors]) -> None:
        """Add the gradients of this rank's pieces, which it computed as one of `group`.

        Args:
            gradients: whole gradients on each rank that shares the parameters.
        """
        if not self.units:
            for name, box in self.boxes.items():
                self._add(name, sum(box.of(each[name]) for each in gradients))
        for unit, reduce in zip(self.units, self.reduces, strict=True):
            mine = gradients[self.position.shard]
            whole = torch.cat([to.row(unit, mine) for to in group])
            part = whole.new_empty(len(whole) // self.sharing.size())
            reduce(part, whole)
            for name, piece in self.pieces(unit, part):
                self._add(name, piece)

    def agree(self, numbers: Tensors) -> Tensors:
        """Return what the replicas make of numbers, by the names of this rank's pieces."""
        assert self.reducer is not None
        # Buckets depend on the order, which is that of parameters.
        agreed = {n: numbers[n].contiguous().clone() for n in self.boxes if n in numbers}
        self.reducer(agreed)
        return agreed

    def end_step(self) -> None:
        """End the step of its communication with ranks that share parameters."""
        for way in (*self.gathers, *self.reduces):
            way.end_step()

    def row(self, unit: Unit, wholes: Tensors) -> Tensor:
        """Return this rank's row of a unit, padded with zeros to the first rank's length."""
        pieces = []
        for name, shape in unit.shapes.items():
            piece = self.boxes[name].of(wholes[name])
            missing = [(0, want - has) for has, want in zip(piece.shape, shape, strict=True)]
            pieces.append(F.pad(piece, [n for pair in reversed(missing) for n in pair]).flatten())
        return torch.cat(pieces)

    def pieces(self, unit: Unit, row: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's part of the result of `row`."""
        sizes = [shape.numel() for shape in unit.shapes.values()]
        for (name, shape), piece in zip(unit.shapes.items(), torch.split(row, sizes), strict=True):
            yield name, Box((0,) * len(shape), self.boxes[name].sizes).of(piece.view(shape))

    def _add(self, name: str, piece: Any) -> None:
        has_some = name in self.gradients
        self.gradients[name] = self.gradients[name] + piece if has_some else piece.clone()


class ModelledRun:
    """Model of all ranks of a layout in one process."""

    def __init__(
        self, job: JobConfig, degrees: Degrees, runs: Sequence[Run], found: Sequence[MeshPosition]
    ):
        """
        Args:
            runs: one of one rank for each replica whose weights may differ.
            found: the place of each rank of the layout.
        """
        self.job, self.degrees, self.runs = job, degrees, runs
        self.device = next(runs[0].model.parts[0].parameters()).device
        sharing = _grouped(found, "stage", "replica", "tensor")
        copies = _grouped(found, "stage", "shard", "tensor")
        shared, copied = _threads(sharing), _threads(copies)
        self.ranks = [
            ModelledRank(position, job, self.device, shared[rank], copied[rank])
            for rank, position in enumerate(found)
        ]
        self.sharing = [[self.ranks[rank] for rank in group] for group in sharing]
        self.copies = [[self.ranks[rank] for rank in group] for group in copies]
        self.steps_apart = 0
        self.agreed = _weights(runs[0])
        self.context = Cut(degrees.cp, job.parallelism.balancing)
        task = open_task(job)
        self.streams = [
            iter(open_stream(job, task, degrees, rank=rank)) for rank in range(degrees.data)
        ]

    def step(self) -> tuple[float, float]:
        """Run one optimizer step; return its loss and gradient norm."""
        passes = self.job.accumulation(self.degrees)
        batches = [
            [hide_targets(next(s)).to(self.device) for _ in range(passes)] for s in self.streams
        ]
        counts = torch.tensor([float(sum(b.count() for b in own)) for own in batches])
        counts = counts.to(self.device)
        for run in self.runs:
            run.optimizers.begin(run.schedule(run.state.step + 1))
        for rank in self.ranks:
            rank.gradients = {}
        per_replica = counts.view(self.degrees.dp_replicate, -1).sum(1)
        loss = 0.0
        for replica in range(self.degrees.dp_replicate):
            count = per_replica[replica] if len(self.runs) > 1 else counts.sum()
            own = batches[replica * self.degrees.dp_shard : (replica + 1) * self.degrees.dp_shard]
            share = self._forward_backward(replica, own, count.clamp(min=1))
            loss += share * float(count / counts.sum())
        for rank in self.ranks:
            rank.end_step()
        if len(self.runs) == 1:
            self._agree_on_gradients()
        norms = []
        for replica, run in enumerate(self.runs):
            self._give(replica, run)
            norm = run.optimizers.norm().complete()
            norms.append(float(norm))
            run.optimizers.step(norm, norms[-1])
            run.state.step += 1
        self._agree_on_weights()
        return loss, max(norms)

    def _forward_backward(
        self, replica: int, batches: Sequence[Sequence[Batch]], count: Tensor
    ) -> float:
        """Compute the gradients of a replica's ranks on all its samples; return the loss."""
        run = self.runs[replica if len(self.runs) > 1 else 0]
        groups = [group for group in self.sharing if group[0].position.replica == replica]
        model, kept, loss = run.model.parts[0], _weights(run), 0.0
        _set_weights(run, self._gathered(groups, kept))
        for number in range(len(batches[0])):
            # Of each rank that shares the parameters: dp_shard, then cp.
            gradients: list[Tensors] = []
            for own in batches:
                with _split(model, self.context) as parts:
                    loss += float(run.model.accumulate([own[number]], count)["loss"])
                gradients += parts()
            for group in groups:
                together({rank.sharing: partial(rank.reduce, group, gradients) for rank in group})
        _set_weights(run, kept)
        return loss

    def _gathered(self, groups: Sequence[Sequence[ModelledRank]], weights: Tensors) -> Tensors:
        """Return the weights with which the ranks of a replica compute."""
        wholes: Tensors = {name: weight.clone() for name, weight in weights.items()}
        for group in groups:
            first, *others = together(
                {rank.sharing: partial(rank.gather, weights) for rank in group}
            )
            for number, (unit, rows) in enumerate(zip(group[0].units, first, strict=True)):
                assert all(torch.equal(rows, other[number]) for other in others)
                for rank, row in zip(group, rows, strict=True):
                    for name, piece in rank.pieces(unit, row):
                        rank.boxes[name].of(wholes[name]).copy_(piece)
        return wholes

    def _agree_on_gradients(self) -> None:
        for group in self.copies:
            if group[0].reducer is not None:
                calls = {rank.copies: partial(rank.agree, rank.gradients) for rank in group}
                for rank, agreed in zip(group, together(calls), strict=True):
                    rank.gradients = agreed
                continue
            for name in group[0].gradients:
                total = torch.stack([rank.gradients[name] for rank in group]).sum(0)
                for rank in group:
                    rank.gradients[name] = total

    def _agree_on_weights(self) -> None:
        """Synchronize replicas' changes of weights after every n-th update."""
        self.steps_apart += 1
        every = self.job.communication.replicas.steps_apart
        if len(self.runs) == 1 or every is None or self.steps_apart < every:
            return
        self.steps_apart = 0
        new = {name: whole.clone() for name, whole in self.agreed.items()}
        for group in self.copies:
            calls = {}
            for rank, now in zip(group, map(_weights, self.runs), strict=True):
                moved = {
                    name: (box.of(self.agreed[name]) - box.of(now[name])) / len(group)
                    for name, box in rank.boxes.items()
                }
                calls[rank.copies] = partial(rank.agree, moved)
            for name, change in together(calls)[0].items():
                group[0].boxes[name].of(new[name]).sub_(change)
        self.agreed = new
        for run in self.runs:
            _set_weights(run, new)

    def _give(self, replica: int, run: Run) -> None:
        """Assemble the gradients of a replica's ranks for its update."""
        wholes = {n: torch.zeros_like(p) for n, p in run.model.parts[0].named_parameters()}
        for rank in self.ranks:
            if rank.position.replica == replica:
                for name, piece in rank.gradients.items():
                    rank.boxes[name].of(wholes[name]).copy_(piece)
        for name, parameter in run.model.parts[0].named_parameters():
            parameter.grad = wholes[name]


def write_modelled_steps(
    job: JobConfig,
    layout: JobConfig,
    found: Sequence[MeshPosition],
    folder: Path,
    at_step: AtStep,
    device: Device = CPU,
) -> list[Step]:
    """Train a model of `layout` in this process, and write its tensors after each step.

    Args:
        job: the run of one rank.
        found: the place of each rank of the layout.
        folder: destination of weights and gradients, by step and replica.
        device: device to train on. Generators of another kind of device draw other numbers.
    """
    logger.setLevel(logging.ERROR)
    degrees, steps = layout.degrees(len(found)), list[Step]()
    copies = degrees.dp_replicate if layout.communication.replicas.runs_apart else 1
    with ExitStack() as stack:
        world = stack.enter_context(open_world(job.degrees(1), job.comm, device))
        stack.enter_context(collectives())
        runs = [build(job, world) for _ in range(copies)]
        for run in runs:
            stack.callback(run.batches.close)
        modelled = ModelledRun(layout, degrees, runs, found)
        for number in range(1, job.training.steps + 1):
            at_step(number)
            loss, norm = modelled.step()
            for replica, run in enumerate(runs):
                named = dict(run.model.parts[0].named_parameters())
                limit = run.optimizers.max_norm
                scale = min(limit / (norm + 1e-6), 1.0) if limit else 1.0
                tensors = {("weight", name): p.detach().clone() for name, p in named.items()}
                if copies == 1:
                    tensors |= {("gradient", n): _gradient(p) / scale for n, p in named.items()}
                torch.save(tensors, folder / f"{number}-{replica}.pt")
            steps.append(Step(number, loss, norm, tuple(named)))
    return steps


def _grouped(found: Sequence[MeshPosition], *axes: str) -> list[list[int]]:
    """Group ranks that have the same place on some axes, in rank order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, position in enumerate(found):
        groups.setdefault(tuple(getattr(position, axis) for axis in axes), []).append(rank)
    return list(groups.values())


def _threads(groups: Sequence[Sequence[int]]) -> dict[int, ThreadGroup]:
    """Return the group of each rank, as that rank sees it."""
    pairs = (zip(group, ThreadGroup.of(len(group)), strict=True) for group in groups)
    return {rank: seen for each in pairs for rank, seen in each}


def _weights(run: Run) -> Tensors:
    return {n: p.detach().clone() for n, p in run.model.parts[0].named_parameters()}


@torch.no_grad()
def _set_weights(run: Run, weights: Tensors) -> None:
    for name, parameter in run.model.parts[0].named_parameters():
        parameter.copy_(weights[name])


@contextmanager
def _split(model: nn.Module, cut: Cut) -> Iterator[Callable[[], list[Tensors]]]:
    """Separate gradients by the part of the sequence that they come from.

    Every module that has parameters of its own works on each position by itself, so it can be given
    other copies of them for other positions.

    Yields:
        A function that returns the gradients of each part, after the backward.
    """
    named = dict(model.named_parameters())
    for parameter in named.values():
        parameter.grad = None
    if cut.size == 1:
        yield lambda: [{n: _gradient(p) for n, p in named.items()}]
        return
    copies = [
        {n: p.detach().clone().requires_grad_() for n, p in named.items()} for _ in range(cut.size)
    ]
    owners = [(n, m) for n, m in model.named_modules() if list(m.parameters(recurse=False))]

    def forward(name: str, module: nn.Module, whole: Callable[..., Tensor], x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])[None]
        parts = [cut.part(at, rank)[0] for rank in range(cut.size)]
        own = {n for n, _ in module.named_parameters(recurse=False)}
        with patch.object(module, "forward", whole):
            found = [
                functional_call(module, {n: c[f"{name}.{n}"] for n in own}, (x[:, part],))
                for part, c in zip(parts, copies, strict=True)
            ]
        return torch.cat(found, 1)[:, torch.cat(parts).argsort()]

    with ExitStack() as stack:
        for name, module in owners:
            replaced = partial(forward, name, module, module.forward)
            stack.enter_context(patch.object(module, "forward", replaced))
        yield lambda: [{n: _gradient(p) for n, p in each.items()} for each in copies]


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
