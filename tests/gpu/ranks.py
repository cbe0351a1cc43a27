"""Stage 2: layouts whose ranks share one device, against one rank of the same device."""

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests import fusion, layouts, tiny
from tests.gpu import hosted
from tests.layouts import LAYOUTS as MAIN
from tests.layouts import alone, compared_by
from tests.research import layouts as research_layouts
from tests.research.layouts import COMPRESSED
from tests.runs import Part, assert_complete, compare, compare_routers, trace
from torchtitan import local_ranks
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.parallel.async_tensor import Fused
from torchtitan.research.common.modelled import places, write_modelled_steps
from torchtitan.tools.verify.recipe import use_float64

EXPERTS = {"Qwen3-MoE, EP 2": layouts.EXPERT_PARALLEL["EP 2"]}
"""Of two ranks, each has half of the experts, and sends the others' rows."""
LAYOUTS = MAIN | EXPERTS | research_layouts.LAYOUTS
OTHERS = {
    "Muon": {"ns_dtype": "float32", "adamw": {"eps": 1e-6}},
    "GaLore": {"rank": 8},
    "Ranger21": {},
}
"""Optimizers that need more than an element at a time."""
WITHIN_A_CODE = {"loss": 1e-6, "norm": 1e-6, "weight": 1e-9}
"""A number that is sent in another code is farther off. Losses and norms are told in float32."""
IN_FLOAT32 = {"loss": 1e-4, "norm": 1e-2, "weight": 0.25}
"""Where some numbers are sent in another code, as in `compare_rounded`: of weights, in parts of how
far they moved since the first step."""


class Fusion(NamedTuple):
    """Blocks to compile, and what must be fused in them."""

    batch: int
    recompute: dict[str, Any] | None
    fused: Fused


FUSED = {
    "async TP 2: operators": None,
    "async TP 2: blocks": Fusion(2, None, Fused(gathers=4, scatters=2)),
    "async TP 2: blocks, one sequence": Fusion(1, None, Fused(gathers=4, scatters=2)),
    "async TP 2: blocks, operators recomputed": Fusion(
        2, fusion.OPERATORS, Fused(gathers=6, scatters=2)
    ),
}
SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Symmetric memory of two ranks on a device. A multicast object has each device once."""
AMONG = ("FSDP 2", "TP 2", "FSDP 2 x TP 2", "PP 2, 1F1B")


def train_each(jobs, kind):
    """In a forked rank: a run of each job."""
    return [trace(job, True, kind) for job in jobs]


def traces(jobs, ranks, kind):
    return hosted.run_ranks(train_each, ranks, kind, jobs, kind)


@cache
def reference(kind, *recipes):
    return traces([JobConfig.model_validate_json(recipe) for recipe in recipes], 1, kind)[0]


def check(name, device, backend):
    """Train a layout by its optimizers; raise AssertionError where it is not one rank's run."""
    if name in FUSED:
        return check_fused(name, device)
    if name in COMPRESSED:
        return check_modelled(name, device)
    other, _, within = name.partition(": ")
    if within:
        layout = LAYOUTS[within]
        jobs, single = [with_other(layout, other)], [with_other(alone(layout), other)]
    else:
        layout = LAYOUTS[name]
        jobs = [layouts.job(layout, optimizer) for optimizer in compared_by(layout)]
        flavor = {"flavor": jobs[0].model.flavor}
        single = [layouts.job(alone(layout), by, model=flavor) for by in compared_by(layout)]
    expected = reference(device.type, *(job.model_dump_json() for job in single))
    results = traces(jobs, layout.ranks, device.type)
    # Parts of a matrix on a GPU are rounded otherwise than the whole, and AdamW amplifies that.
    allowed = 2e-5 if device.type == "cuda" else 1e-5
    for number, right in enumerate(expected):
        found = [ranks[number] for ranks in results]
        assert_complete(found, right)
        for rank, own in enumerate(found):
            where = f"{jobs[number].optimizer.name}, rank {rank}"
            if (layout.convert or other == "GaLore") and device.type == "cuda":
                compare_rounded(own, right, where)
            else:
                compare(own, right, where, allowed)
                if jobs[number].optimizer.name == "SGD":
                    compare_routers(own, right, where)
    return {}


def with_other(layout, name):
    sections = {
        "model": {"flavor": "deep"},
        "optimizer": {"name": name, "lr": 1e-3, **OTHERS[name]},
    }
    return tiny.job(**layout.recipe(training={"max_norm": 0.3}, **sections))


def compare_rounded(found, expected, where):
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


def check_modelled(name, device):
    """Train a layout whose messages are compressed, and the model of its ranks, both in float64,
    which CUDA's kernels of attention to several ranks' keys do not have."""
    layout, given = COMPRESSED[name], {"training": {"steps": 4}}
    is_exact = layout.cp == 1 or device.type == "cpu"
    allowed = WITHIN_A_CODE if is_exact else IN_FLOAT32
    job = layouts.job(layout, "SGD", **given)
    flavor = {"flavor": job.model.flavor}
    one = layouts.job(alone(layout), "SGD", **given, model=flavor)
    if is_exact:
        one, job = use_float64(one), use_float64(job)
    meshed = local_ranks.run_ranks(places, layout.ranks, job, at_step)
    off = {"loss": 0.0, "norm": 0.0, "weight": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (one, job, meshed, Path(folder), at_step, Device(device.type))
        (steps,) = hosted.run_ranks(write_modelled_steps, 1, device.type, *arguments)
        for rank, (run,) in enumerate(traces([job], layout.ranks, device.type)):
            replica = meshed[rank].replica if job.communication.replicas.runs_apart else 0
            for step, loss, norm, weights in zip(
                steps, run.losses, run.grad_norms, run.weights, strict=True
            ):
                off["loss"] = max(off["loss"], abs(loss / step.loss - 1))
                off["norm"] = max(off["norm"], abs(norm / step.grad_norm - 1))
                file = Path(folder, f"{step.number}-{replica}.pt")
                wholes = torch.load(file, map_location="cpu")
                rights = {n: p.of(Part(wholes["weight", n], ())) for n, p in weights.items()}
                apart = torch.cat([(rights[n] - p.local).flatten() for n, p in weights.items()])
                if is_exact:
                    off["weight"] = max(off["weight"], apart.abs().max().item())
                elif weights is not run.weights[0]:
                    first = run.weights[0]
                    moved = torch.cat([(rights[n] - first[n].local).flatten() for n in rights])
                    off["weight"] = max(off["weight"], (apart.norm() / moved.norm()).item())
            assert all(off[kind] <= allowed[kind] for kind in off), f"rank {rank}: {off}"
    return off


def at_step(number):
    """Nobody waits for the number of a step."""


def check_fused(name, device):
    """Async tensor parallelism: its operators, and blocks in which the compiler puts them.

    NVIDIA's and torch's own checks expect a device for each rank. If torch refuses, the case is
    left out, and says where.
    """
    given = FUSED[name]
    os.environ.update(SHARED)
    try:
        if given is None:
            return hosted.run_ranks(fusion.compare_operators, 2, device.type, device.type)[0]
        backend = "inductor" if device.type == "cuda" else fusion.WITHOUT_CODE
        arguments = (given.batch, given.recompute, backend, device.type)
        results = hosted.run_ranks(fusion.compare, 2, device.type, *arguments)
    except local_ranks.RanksFailed as error:
        if (where := refused(str(error))) is None:
            raise
        return {"left out": f"torch refuses: {where}"}
    finally:
        for variable in SHARED:
            del os.environ[variable]
    assert {*results} == {given.fused}, results
    return given.fused._asdict()


def refused(tracebacks):
    """The error of a rank and its place, if that is in torch and no assertion of ours."""
    lines = tracebacks.splitlines()
    places = [line.strip() for line in lines if line.startswith('  File "')]
    if not places or "/torch/" not in places[-1] or lines[-1].startswith("AssertionError"):
        return None
    return f"{lines[-1]} ({places[-1]})"


def names(rehearsed):
    """The layouts: all, or in a rehearsal one of each kind."""
    if rehearsed:
        some = ["FSDP 2", "TP 2", "CP 2, ring", "CP 2, balanced by documents, window", "PP 2, 1F1B"]
        return [*some, *EXPERTS, "Muon: FSDP 2", *list(FUSED)[:2], *COMPRESSED]
    others = [f"{other}: {layout}" for other in OTHERS for layout in AMONG]
    return [*FUSED, *COMPRESSED, *LAYOUTS, *others]
