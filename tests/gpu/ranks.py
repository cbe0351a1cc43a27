"""Stage 2: layouts whose ranks share one device, against one rank of the same device."""

import os
import tempfile
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import layouts, tiny
from tests.gpu import hosted
from tests.layouts import LAYOUTS as MAIN
from tests.layouts import OPTIMIZERS, Case, alone
from tests.research import layouts as research_layouts
from tests.runs import Trace, assert_complete, compare, trace
from torchtitan import local_ranks
from torchtitan.device import Device
from torchtitan.job import JobConfig

LAYOUTS = MAIN | research_layouts.LAYOUTS
OTHERS: dict[str, dict[str, Any]] = {
    "Muon": {"ns_dtype": "float32", "adamw": {"eps": 1e-6}},
    "GaLore": {"rank": 8},
    "Ranger21": {},
}
"""Optimizers that need more than an element at a time."""
AMONG = ("FSDP 2", "TP 2", "FSDP 2 x TP 2", "PP 2, 1F1B")


def share_a_device(store: str, kind: str, jobs: list[JobConfig]) -> list[Trace]:
    """In a forked rank: a run of each job, all ranks on the first device of that kind."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # A rank that left the group while another still connects to it would fail it.
    dist.destroy_process_group()
    hosted.register()
    dist.init_process_group(
        hosted.NAME,
        store=dist.FileStore(store, size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=100),
    )
    os.environ["LOCAL_RANK"] = "0"
    if kind == "cuda":
        torch.cuda.set_device(0)
    return [trace(job, True, kind) for job in jobs]


def traces(jobs: list[JobConfig], ranks: int, kind: str) -> list[list[Trace]]:
    """Of each rank, a run of each job. The parent must not have used CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "hosted")
        return local_ranks.run_ranks(share_a_device, ranks, store, kind, jobs)


@cache
def reference(kind: str, *recipes: str) -> list[Trace]:
    return traces([JobConfig.model_validate_json(recipe) for recipe in recipes], 1, kind)[0]


def check(name: str, device: Device) -> dict[str, Any]:
    """Train a layout with both optimizers; raise AssertionError where it is not one rank's run."""
    other, _, within = name.partition(": ")
    if within:
        layout = LAYOUTS[within]
        jobs, single = [with_other(layout, other)], [with_other(alone(layout), other)]
    else:
        layout = LAYOUTS[name]
        jobs = [layouts.job(layout, optimizer) for optimizer in OPTIMIZERS]
        flavor = jobs[0].model.flavor
        single = [layouts.job(alone(layout), opt, model={"flavor": flavor}) for opt in OPTIMIZERS]
    expected = reference(device.type, *(job.model_dump_json() for job in single))
    results = traces(jobs, layout.ranks, device.type)
    for number, right in enumerate(expected):
        found = [ranks[number] for ranks in results]
        assert_complete(found, right)
        for rank, own in enumerate(found):
            where = f"{jobs[number].optimizer.name}, rank {rank}"
            if (layout.convert or other == "GaLore") and device.type == "cuda":
                compare_rounded(own, right, where)
            else:
                compare(own, right, where)
    return {}


def with_other(layout: Case, name: str) -> JobConfig:
    """The tiny recipe with one of `OTHERS`."""
    sections = {
        "model": {"flavor": "deep"},
        "optimizer": {"name": name, "lr": 1e-3, **OTHERS[name]},
    }
    return tiny.job(**layout.recipe(training={"max_norm": 0.3}, **sections))


def compare_rounded(found: Trace, expected: Trace, where: str) -> None:
    """A converted model's runs: a GPU's matrix product depends on the shapes of its parts in the
    last bit, and what Float8 rounds to the nearest may then be its neighbour, an eighth away. On an
    H100 the weights of TP 2 x PP 2 were 0.15 of their way apart after two steps of AdamW."""
    for step, weights in enumerate(found.weights):
        assert abs(found.losses[step] / expected.losses[step] - 1) <= 1e-4, where
        assert abs(found.grad_norms[step] / expected.grad_norms[step] - 1) <= 1e-2, where
        off = moved = 0.0
        for name, part in weights.items() if step else ():
            right = part.of(expected.weights[step][name])
            off += (right - part.local).square().sum().item()
            moved += (right - part.of(expected.weights[0][name])).square().sum().item()
        assert off <= 0.25**2 * moved, (
            f"{where}, step {step + 1}: off by {(off / moved) ** 0.5} of the way"
        )


def names(rehearsed: bool) -> list[str]:
    """The layouts: all, or in a rehearsal one of each kind."""
    if rehearsed:
        return [
            "FSDP 2",
            "TP 2",
            "CP 2, ring",
            "CP 2, balanced by documents, window",
            "PP 2, 1F1B",
            "Muon: FSDP 2",
        ]
    return [*LAYOUTS, *(f"{other}: {layout}" for other in OTHERS for layout in AMONG)]
