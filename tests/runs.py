"""Trains the tiny model in this process and reports what every layout must agree on."""

import dataclasses
import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.build import Run, build
from torchtitan.data import Batch
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.parallel import Launch, open_world
from torchtitan.train import choose
from torchtitan.trainer import Trainer


@dataclass
class Trace:
    """What was measured at each step of a run, and the weights after each."""

    losses: list[float]
    grad_norms: list[float]
    weights: list[dict[str, Tensor]]


class Recorder:
    """A sink that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def open(self, start_step: int) -> None: ...

    def close(self, summary: Any) -> None: ...

    def write(self, step: int, metrics: Any) -> None:
        self.rows.append({"step": step, **metrics})


class UnevenTargets:
    """Hides targets, as many as the content of each sequence says: ranks get unequal counts."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __next__(self) -> Batch:
        batch = next(self.stream)
        keep = batch.tokens.sum(1, keepdim=True) % batch.tokens.shape[1] + 1
        hidden = torch.arange(batch.tokens.shape[1]) >= keep
        return dataclasses.replace(batch, targets=batch.targets.masked_fill(hidden, -100))


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor, on the CPU."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().clone()


def weights(run: Run) -> dict[str, Tensor]:
    """All weights of all ranks, on every rank."""
    return {name: whole(p) for part in run.model.parts for name, p in part.state_dict().items()}


def trace(job: JobConfig, uneven: bool = False, device: str = "cpu") -> Trace:
    """Train every step of `job` on this rank's share of the world."""
    launch = Launch.read()
    kind = Device("cpu") if device == "cpu" else Device("cuda", launch.local_rank)
    with open_world(job.degrees(launch.size), job.comm, kind) as world:
        run = build(job, world)
        result = Trace([], [], [])
        with closing(run.data):
            if uneven:
                run.data = UnevenTargets(run.data)  # type: ignore[assignment]
            recorder = Recorder()
            run.meter.sinks = [recorder]
            trainer = Trainer(run)
            with run.meter:
                for _ in range(job.training.steps):
                    trainer.step()
                    result.weights.append(weights(run))
            result.losses = [row["loss"] for row in recorder.rows]
            result.grad_norms = [row["grad_norm"] for row in recorder.rows]
        return result


def train(job: JobConfig) -> dict[str, Tensor]:
    """Train as the entry point does, resuming if the recipe says so; the weights at the end."""
    launch = Launch.read()
    with open_world(job.degrees(launch.size), job.comm, Device("cpu")) as world:
        start = choose(job) if world.rank == 0 else None
        start = world.share(start)
        run = build(job, world)
        with closing(run.data):
            Trainer(run).train(start)
        return weights(run)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """Training loss by step."""
    return {row["step"]: row["loss"] for row in rows(folder) if "loss" in row}
