"""Trains a recipe and looks at every step: loss, gradient norm, samples, each gradient and weight.

One run leaves what it has in a folder; the ranks of another then compare what each of them holds
with its place in that. So an error is found on the rank that made it, no weight is sent, and copies
of a weight that should be the same are compared one by one. One rank writes weights and gradients;
a run that is never stopped saves a checkpoint of every step. Samples are identified by a hash of
their content.
"""

import dataclasses
import importlib
import logging
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from torchtitan.build import Observer, Run, build
from torchtitan.checkpoint import TrainState, saved_steps
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.checkpoint.storage import SavedTensors
from torchtitan.checks import problems
from torchtitan.config import PlannedWorld, Problem
from torchtitan.data import Batch
from torchtitan.device import GIB, Device
from torchtitan.inputs import problems_of_task
from torchtitan.job import JobConfig
from torchtitan.local_ranks import RanksFailed, run_ranks
from torchtitan.logging import logger, progress_bar
from torchtitan.losses import IGNORED
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.optim import SGD
from torchtitan.optim.parameters import local
from torchtitan.parallel import Launch, World, open_world
from torchtitan.tasks.next_token import TokenBatch
from torchtitan.torch_private.dtensor import local_extent
from torchtitan.trainer import Trainer, choose

Row = dict[str, Any]
AtStep = Callable[[int], None]

WEIGHT = 1e-5
ALLOWED = {"weight": WEIGHT, "gradient": 1e-4, "optimizer": 1e-3}
"""Tolerance of a tensor by kind, if layouts differ; tensors of other kinds must be equal."""


class RowSink:
    """A sink that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def open(self, start_step: int) -> None: ...

    def close(self, summary: Any) -> None: ...

    def write(self, step: int, metrics: Any) -> None:
        self.rows.append({"step": step, **metrics})

    def last_step(self) -> Row:
        """The row of the last step; an event, such as a straggler, has one of its own after it."""
        return next(row for row in reversed(self.rows) if "loss" in row)


def hide_targets(batch: Batch) -> Batch:
    """Hide some targets of text, by its content, so that ranks have different numbers of them.

    With equal numbers a mean of means is the mean, and a wrong average cannot be seen.
    """
    if not isinstance(batch, TokenBatch):
        return batch
    length = batch.tokens.shape[1]
    kept = batch.tokens.sum(1, keepdim=True) % length + 1
    hidden = torch.arange(length) >= kept
    return dataclasses.replace(batch, targets=batch.targets.masked_fill(hidden, IGNORED))


def training(job: JobConfig, device: Device, *, uneven: bool) -> Iterator[tuple[Run, Row]]:
    """Train on this rank's share of the world; after each step, the run and its row of metrics.

    `job.metrics.log_freq` is 1. With `uneven` the ranks get different numbers of targets.
    """
    launch = Launch.read()
    recorder = RowSink()
    observer = Observer(sinks=[recorder])
    if uneven:
        observer = dataclasses.replace(observer, on_microbatch=hide_targets)
    with open_world(job.degrees(launch.size), job.comm, device) as world:
        run = build(job, world, observer)
        trainer = Trainer(run)
        with closing(run.batches), run.meter:
            for _ in range(job.training.steps):
                trainer.step()
                yield run, recorder.last_step()


@dataclass(frozen=True)
class TensorDifference:
    """The element in which a tensor is farthest off."""

    kind: str
    """A key of `ALLOWED`, or another part of a checkpoint."""
    name: str
    index: tuple[int, ...]
    found: float
    expected: float
    off: float
    """Absolute for weights, beyond what the error of their gradients explains; else in parts of the
    tensor's largest element."""

    @property
    def is_allowed(self) -> bool:
        """Whether it may be rounding."""
        return self.off <= ALLOWED.get(self.kind, 0.0)

    def __str__(self) -> str:
        what = "gradient of " if self.kind == "gradient" else ""
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{what}{self.name}{where} is {self.found:.6g}"


@dataclass(frozen=True)
class Step:
    """State of a rank after a step; the first of a resumed run is the state it starts from."""

    number: int
    loss: float | None = None
    grad_norm: float | None = None
    names: tuple[str, ...] = ()
    """Tensors that the rank has a part of, in order."""
    differences: tuple[TensorDifference, ...] = ()
    """Tensors that are not equal to the bit."""
    samples: Mapping[int, int] = field(default_factory=dict)
    """The hash of each sample that this rank read in the step, by its number in the run."""
    counters: Mapping[str, Any] = field(default_factory=dict)
    """Counters of the run, and the position of its data."""


Look = Callable[[Run, Row | None], Iterable[tuple[str, TensorDifference | None]]]
"""(the run, the metrics of its step; None before the first) to what each tensor differs in."""


def write_steps(job: JobConfig, folder: Path, at_step: AtStep) -> list[Step]:
    """Train on one rank, and write what it has after each step to `folder`."""

    def look(run: Run, row: Row | None) -> Iterator[tuple[str, None]]:
        if row is not None:
            tensors = dict(_weights(run, row))
            mine = {key: local(tensor).detach().clone() for key, tensor in tensors.items()}
            torch.save(mine, folder / f"{row['step']}-0.pt")
            yield from ((name, None) for _, name in tensors)

    return train(job, look, at_step, on_microbatch=hide_targets)[1:]


def compare_steps(job: JobConfig, folder: Path, at_step: AtStep) -> list[Step]:
    """Train on this rank's share of a layout, and compare each step with what is in `folder`.

    A replica that runs apart is compared with what is there of it: its weights.
    """
    slack = Slack(job)

    def look(run: Run, row: Row | None) -> Iterator[tuple[str, TensorDifference | None]]:
        if row is not None:
            copy = run.checkpoint.contents.copy
            expected = torch.load(folder / f"{row['step']}-{copy}.pt", mmap=True)
            for (kind, name), tensor in _weights(run, row):
                if (whole := expected.get((kind, name))) is None:
                    continue
                if kind == "weight":
                    yield name, difference(kind, name, tensor, whole, slack=slack.allowed(name))
                    continue
                place = _place(tensor, whole)  # empty if this rank has no part
                slack.add(name, local(tensor), place)
                # A part may have small gradients only, and those of a tensor may all be rounding.
                parts = whole.abs().max().item() / 10 + row["grad_norm"] / 1000
                largest = place.abs().max().item() if place.numel() else 0.0
                yield name, difference(kind, name, tensor, whole, largest + parts)

    return train(job, look, at_step, on_microbatch=hide_targets)[1:]


def compare_checkpoints(
    job: JobConfig, reference: Path | None, kill_after: int | None, at_step: AtStep
) -> list[Step]:
    """Train on this rank's share of the world, from where the recipe says that it begins.

    Args:
        reference: checkpoints of every step of the run to compare with.
        kill_after: the step after which, once all is saved that should be, the last rank dies.
    """
    saved = saved_steps(reference) if reference else {}

    def look(run: Run, row: Row | None) -> Iterator[tuple[str, TensorDifference | None]]:
        if run.state.step not in saved:
            return
        checkpoint = SavedTensors(saved[run.state.step])
        # Random numbers can be compared only where as many ranks draw them.
        has_rng = read_manifest(checkpoint.checkpoint).ranks == Launch.read().size
        for name, tensor in run.checkpoint.contents.tensors().items():
            if has_rng or not name.startswith("rng."):
                part = name.partition(".")[0]
                kind = "weight" if part == "model" else part
                yield name, difference(kind, name, tensor, checkpoint)

    return train(job, look, at_step, kill_after=kill_after)


def die() -> None:
    """End this process as the kernel does when memory runs out: nothing more is done."""
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    job: JobConfig,
    look: Look,
    at_step: AtStep,
    *,
    on_microbatch: Callable[[Batch], Batch] = lambda batch: batch,
    kill_after: int | None = None,
) -> list[Step]:
    """Train on this rank's share of the world, as the entry point does, and look at each step."""
    logger.setLevel(logging.ERROR)  # this process is one of many, and has nothing else to say
    launch = Launch.read()
    with open_world(job.degrees(launch.size), job.comm, Device("cpu")) as world:
        start = world.broadcast_object(choose(job) if world.rank == 0 else None)
        recorder = StepRecorder(world, look, at_step, on_microbatch, kill_after)
        recorder.run = build(job, world, recorder.observer())
        with closing(recorder.run.batches):
            Trainer(recorder.run).train(start)
    return recorder.steps


class StepRecorder:
    """Looks at a run before its first step, and after each."""

    run: Run

    def __init__(
        self,
        world: World,
        look: Look,
        at_step: AtStep,
        change: Callable[[Batch], Batch],
        kill_after: int | None,
    ) -> None:
        self.world, self.look, self.at_step, self.change = world, look, at_step, change
        self.kill_after = kill_after
        self.steps: list[Step] = []
        self.recorder = RowSink()
        self.hashes: list[int] = []
        """Digests of the samples of a step, as they were read."""

    def observer(self) -> Observer:
        """Return the observer that records the run."""
        return Observer(
            before_step=self.before_step,
            on_microbatch=self.on_microbatch,
            after_step=self.after_step,
            sinks=[self.recorder],
        )

    def before_step(self, step: int) -> None:
        if not self.steps:
            self.steps.append(self.step(None, {}))
        self.hashes.clear()
        self.at_step(step)

    def on_microbatch(self, batch: Batch) -> Batch:
        for inputs, targets in zip(batch.inputs.numpy(), batch.targets.numpy(), strict=True):
            self.hashes.append(xxhash.xxh3_64_intdigest(inputs.tobytes() + targets.tobytes()))
        return self.change(batch)

    def after_step(self, state: TrainState) -> None:
        mine = len(self.hashes)
        first = (state.step - 1) * mine * self.world.degrees.data + self.world.data_rank * mine
        samples = dict(enumerate(self.hashes, first))
        self.steps.append(self.step(self.recorder.last_step(), samples))
        if state.step == self.kill_after:
            self.run.checkpoint.finish()
            if self.world.rank == self.world.size - 1:
                die()

    def step(self, row: Row | None, samples: Mapping[int, int]) -> Step:
        """Return the current state of this rank."""
        run, seen = self.run, list(self.look(self.run, row))
        loss, grad_norm = (row["loss"], row["grad_norm"]) if row else (None, None)
        differences = tuple(found for _, found in seen if found is not None)
        names = tuple(dict.fromkeys(name for name, _ in seen))
        position = self.world.broadcast_object(run.checkpoint.contents.position())
        data, counted = position["data"], position["train_state"].items()
        counters = {f"train_state.{name}": at for name, at in counted if isinstance(at, int)}
        counters["data.samples"] = data["samples"]
        counters |= {f"data.lanes.{lane}": at for lane, at in enumerate(data.get("lanes", ()))}
        for source in data.get("sources", ()):
            counters[f"data.sources.{source['name']}"] = source["position"]
        return Step(run.state.step, loss, grad_norm, names, differences, samples, counters)


def _weights(run: Run, row: Row) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Each weight, and its gradient as it was before it was clipped."""
    limit = run.optimizers.max_norm
    scale = min(limit / (row["grad_norm"] + 1e-6), 1.0) if limit else 1.0
    for part in run.model.parts:
        for name, parameter in part.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield ("gradient", name), gradient / scale
            yield ("weight", name), parameter


class Slack:
    """Errors of weights that follow from the errors of their gradients.

    An update of Adam is a function of g / (|g| + eps), or in later steps of means of g and of g^2
    with the same slope: at most 2 lr / (|g| + eps), up to 2 lr. That of SGD is linear.
    """

    def __init__(self, job: JobConfig) -> None:
        chosen = job.optimizer
        factor = max((group.lr_factor for group in chosen.groups), default=1.0)
        self.step = 0.0 if isinstance(chosen, SGD) else 2 * chosen.lr * max(factor, 1.0)
        self.eps = getattr(chosen, "eps", None) or torch.finfo(torch.float32).tiny
        self.errors: dict[str, Tensor] = {}
        """Relative errors of gradients, added up over the steps."""
        self.sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, name: str, found: Tensor, expected: Tensor) -> None:
        """Add what the error of a gradient in a step allows."""
        error = (found.cpu() - expected).abs() / (expected.abs() + self.eps)
        self.errors[name] = self.errors.get(name, 0.0) + error
        self.sums[name] = self.sums.get(name, 0.0) + self.step * self.errors[name].clamp(max=1.0)

    def allowed(self, name: str) -> Tensor | float:
        """Return the errors that are allowed of the elements of this rank's part of a weight."""
        return self.sums.get(name, 0.0)


def _offset(tensor: Tensor) -> tuple[int, ...]:
    """Return where this rank's part of a tensor begins in the whole."""
    from torch.distributed.tensor import DTensor

    return local_extent(tensor)[1] if isinstance(tensor, DTensor) else (0,) * tensor.ndim


def _place(tensor: Tensor, whole: Tensor) -> Tensor:
    """Return the place in `whole` of this rank's part of a tensor."""
    extents = zip(_offset(tensor), local(tensor).shape, strict=True)
    return whole[tuple(slice(begin, begin + size) for begin, size in extents)]


@torch.no_grad()
def difference(
    kind: str,
    name: str,
    tensor: Tensor,
    whole: Tensor | SavedTensors,
    largest: float | None = None,
    slack: Tensor | float = 0.0,
) -> TensorDifference | None:
    """Find where this rank's part of a tensor differs most from its place in `whole`.

    Args:
        largest: of the whole; absent: of the part.
        slack: errors that are allowed of each element, and not counted.

    Returns:
        None where they are the same to the bit, and where this rank has no part.
    """
    part, offset = local(tensor).cpu(), _offset(tensor)
    if isinstance(whole, SavedTensors):
        expected = whole.read(name, offset, part.shape).to(part.dtype)
    else:
        expected = _place(tensor, whole)
    if torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (part, expected))):
        return None
    error = (part.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
    off = (error - slack).clamp(min=0)
    at = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    index = tuple(o + i for o, i in zip(offset, at, strict=True))
    scale = expected.double().abs().max().item() if largest is None else largest
    farthest = off[at].item() / ((1.0 if kind == "weight" else scale) or 1.0)
    return TensorDifference(kind, name, index, part[at].item(), expected[at].item(), farthest)


Result = TypeVar("Result")

# What need not be there for a recipe to be verified.
EXEMPT = (
    "model.tokenizer_path",
    "data.dataset_path",
    "checkpoint.initial_load_path",
    "validation.dataset_path",
    "metrics.sinks",
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


def describe_ranks(count: int) -> str:
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
