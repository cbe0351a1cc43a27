"""GaLore on several ranks: every matrix is projected as a whole, wherever its parts are."""

import itertools
from functools import cache

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tests import tiny
from tests.layouts import ONE, case, named, resumed
from tests.ranks import run_ranks
from tests.research.layouts import SIMPLE, installed
from tests.runs import are_the_runs_of_one_rank, each, off, resumes, trace
from tests.tiers import tiers
from torchtitan.optim import NamedParameter, Optimizers
from torchtitan.optim.adam_and_sgd import STATE_DTYPES
from torchtitan.plan.fake_rank import record
from torchtitan.plan.recording import Kernel
from torchtitan.research.galore.galore import GaLore
from torchtitan.torch_private.dtensor import placed

SPLIT = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "rows, columns": ((2, 2), (Shard(0), Shard(1))),
    "columns, rows": ((2, 2), (Shard(1), Shard(0))),
    "copies, rows": ((2, 2), (Replicate(), Shard(0))),
    "copies, columns": ((2, 2), (Replicate(), Shard(1))),
    "rows, rows": ((2, 2), (Shard(0), Shard(0))),
    "rows within rows": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
}
"""Meshes, and how a matrix lies on them."""
SHAPES = {"even": (12, 8), "uneven": (10, 7), "a rank has none": (3, 9)}
STEPS = 3


def variants(shape):
    common = {"lr": 0.05, "rank": 2, "refresh_period": 2, "oversampling": 1}
    return [
        GaLore.model_validate(common | {"project": project, "moments": moments})
        for project, moments in (("rows", "rotate"), ("columns", "keep"))
    ]


def gradients(shape):
    """Of every step; their singular values fall by halves."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(STEPS):
        u, _, v = torch.linalg.svd(torch.randn(*shape, generator=generator), full_matrices=False)
        found.append(u * 0.5 ** torch.arange(u.shape[1]) @ v)
    return found


@cache
def mesh_of(sizes):
    return init_device_mesh("cpu", sizes)


def laid_out(whole, split):
    """This rank's part of a matrix, in its place."""
    sizes, placements = SPLIT[split]
    mesh = mesh_of(sizes)
    shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    part = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    return placed(part.clone(), mesh, placements, whole.shape)


def updated(names):
    """Weight and states after all steps, whole, and this rank's projector, of every variant."""
    return {
        name: [update(SHAPES[name[1]], config, name[0]) for config in variants(SHAPES[name[1]])]
        for name in names
    }


def update(shape, config, split):
    weight = gradients(shape)[0].clone()
    tensor = weight if split is None else laid_out(weight, split)
    optimizer = Optimizers([NamedParameter(tensor, "w", "matrix")], config)
    for gradient in gradients(shape):
        tensor.grad = gradient if split is None else laid_out(gradient, split)
        optimizer.step()
    found = {"weight": tensor} | optimizer.state_dict()
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}
    sizes = {
        f"{name}, held": torch.tensor(t.to_local().numel())
        for name, t in found.items()
        if isinstance(t, DTensor)
    }
    return whole | sizes


def is_possible(split, shape):
    """Torch places rows within rows only where that comes out even."""
    return split != "rows within rows" or shape == "even"


@pytest.mark.gate
@pytest.mark.costs("every way to split on four ranks")
def test_a_matrix_is_projected_as_a_whole():
    names = [name for name in itertools.product(SPLIT, SHAPES) if is_possible(*name)]
    ranks = run_ranks(updated, 4, names)
    for split, shape in names:
        m, n = SHAPES[shape]
        for number, config in enumerate(variants((m, n))):
            expected = update((m, n), config, None)
            for rank in ranks:
                found = rank[split, shape][number]
                for name, value in expected.items():
                    off = (found[name] - value).abs().max().item()
                    assert off <= 3e-6, f"{split}, {shape}, {config.project}: {name}: {off}"
                projector = ranks[0][split, shape][number]["w.projector"]
                assert torch.equal(found["w.projector"], projector)
            # A moment is shared by all ranks that share the matrix.
            held = sum(rank[split, shape][number]["w.exp_avg, held"] for rank in ranks)
            copies = 2 if "copies" in split else 1
            # What an earlier axis splits is shared within the parts of a later one only evenly.
            nested = {"rows": "rows, columns", "columns": "columns, rows"}.get(config.project)
            if shape == "even" or split != nested:
                assert held == copies * expected["w.exp_avg"].numel(), (split, shape)


LAYOUTS = named(
    *("HSDP 2 x 2", "TP 2", "CP 2", "FSDP 2 x TP 2", "FSDP 2 x PP 2", "FSDP 2 x CP 2"),
    *("TP 2 x PP 2", "FSDP 2 x TP 2 x PP 2"),
) | installed(
    {
        "FSDP 4, uneven": case(shard=4),
        "PP 2": case(2, batch=4),
        "SimpleFSDP 2 x TP 2": case(shard=2, tp=2, sharding=SIMPLE),
    }
)
VARIANTS = ({}, {"project": "longer", "svd": "exact", "rank": 5, "moments": "rotate"})


def job(layout, folder="unused", max_norm=0.3, **optimizer):
    settings = {"name": "GaLore", "lr": 4e-3, "refresh_period": 2} | optimizer
    # 70 rows are no multiple of 4.
    model = {"flavor": "deep", "n_layers": 2, "ffn_dim": 70}
    sections = {"training": {"max_norm": max_norm}, "optimizer": settings, "model": model}
    return tiny.job(folder, **layout.recipe(**sections))


@pytest.mark.parametrize("name", tiers(LAYOUTS, [], gate=["HSDP 2 x 2", "TP 2", "PP 2"]))
@pytest.mark.usefixtures("uncompiled")
def test_a_run_is_that_of_one_rank(name):
    found, expected = ([job(where, **of) for of in VARIANTS] for where in (LAYOUTS[name], ONE))
    are_the_runs_of_one_rank(LAYOUTS[name], found, expected)


@pytest.mark.gate
def test_a_run_resumes_within_a_period_on_another_layout(tmp_path):
    def made(folder, layout, steps):
        base = job(layout, folder, refresh_period=2, moments="rotate")
        changes = resumed(steps, 5, 3).items()
        return base.model_copy(
            update={name: getattr(base, name).model_copy(update=keys) for name, keys in changes}
        )

    resumes(made, tmp_path, case(shard=2), {"TP 2": case(tp=2)}, 3, 5, 1e-5)


@pytest.mark.gate
@pytest.mark.usefixtures("uncompiled")
def test_updates_in_the_backward():
    layout, early = case(shard=2, batch=4), {"early_step_in_backward": True}
    jobs = [job(layout, max_norm=0, **early), job(layout, max_norm=0)]
    for found, late in run_ranks(each, 2, trace, jobs, True):
        assert found.losses == late.losses
        weights = found.weights[-1].items()
        assert all(torch.equal(w.local, late.weights[-1][name].local) for name, w in weights)


@pytest.mark.gate
@pytest.mark.skipif("8bit" not in STATE_DTYPES, reason="the system is not there")
@pytest.mark.usefixtures("uncompiled")
def test_moments_in_few_bits():
    """At this rank each part is large enough for codes, whose blocks are then those of one rank."""
    few = {"state_dtype": "8bit", "rank": 64}
    wide = {"flavor": "square"}
    one, two = (
        job(layout, **few).model_copy(update={"model": tiny.job(**layout.recipe(model=wide)).model})
        for layout in (ONE, case(shard=2))
    )
    ((expected,),) = run_ranks(each, 1, trace, [one], True)
    found = [rank[0] for rank in run_ranks(each, 2, trace, [two], True)]
    assert off(found, expected) < 0.02


@pytest.mark.parametrize("name", tiers(["FSDP 2 x TP 2", "TP 2 x PP 2"], [], ["TP 2 x PP 2"]))
def test_a_plan_is_of_a_step_between_refreshes(name):
    layout = LAYOUTS[name]
    often, rarely = (
        {event.name for event in found.recording.events if isinstance(event, Kernel)}
        for found in (
            record(job(layout, refresh_period=period), layout.ranks) for period in (1, 200)
        )
    )
    assert {each for each in often if "eigh" in each}
    assert not {each for each in rarely if "eigh" in each}
