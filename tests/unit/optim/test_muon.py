"""Muon on one rank, and what is refused of it."""

import copy
import dataclasses
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.ranks import run_ranks
from tests.tiny import named
from torchtitan.device import GIB
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.optim import AdamW, Muon, Optimizers, name_parameters, state_bytes
from torchtitan.optim.muon import AdamWPart, newton_schulz

SHAPES = [(8, 8), (6, 20), (20, 6), (1, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("steps", [1, 5])
def test_newton_schulz_maps_the_singular_values_by_the_quintic(shape, steps):
    """The oracle knows singular values and a polynomial, and no product of matrices."""
    matrices = np.random.default_rng(0).normal(size=(3, *shape))
    left, values, right = np.linalg.svd(matrices, full_matrices=False)
    values /= np.sqrt((values**2).sum(-1, keepdims=True))
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left * values[:, None] @ right
    found = newton_schulz(torch.from_numpy(matrices).float(), steps)
    assert np.abs(found.numpy() - expected).max() < 1e-4
    if steps == 5 and shape[0] != shape[1]:
        assert 0.6 < values.min() <= values.max() < 1.25


def test_matrices_of_a_batch_do_not_see_each_other():
    torch.manual_seed(0)
    matrices = torch.randn(3, 5, 7)
    together = newton_schulz(matrices * torch.tensor([1.0, 1e3, 1e-3]).view(3, 1, 1), 5)
    alone = torch.cat([newton_schulz(matrix[None], 5) for matrix in matrices])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert not newton_schulz(torch.zeros(1, 2, 3), 5).any()


def trained(steps, made):
    """Weights of two matrices after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40, bias=False), nn.Linear(40, 16, bias=False))
    optimizer = made(model)
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(32, 24)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_on_one_rank_it_is_that_of_torch(scale, nesterov):
    """Both compute in bfloat16, in which sums may round differently: a step of it is 2**-8."""
    common = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "nesterov": nesterov}
    expected = trained(
        5, lambda model: torch.optim.Muon(model.parameters(), adjust_lr_fn=scale, **common)
    )
    config = Muon(scale=scale, **common)
    found = trained(5, lambda model: Optimizers(named(model), config))
    start = trained(0, lambda model: None)
    for own, theirs, first in zip(found, expected, start, strict=True):
        assert (own - theirs).norm() < 1e-2 * (theirs - first).norm()
    other = trained(5, lambda model: Optimizers(named(model), Muon(**common, ns_steps=4)))
    assert (other[0] - expected[0]).norm() > 1e-2 * (expected[0] - start[0]).norm()


def updated_in_parts(gradient, config):
    """The update of a matrix of zeros whose rows are dealt out to all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = nn.ParameterDict({"w": distribute_tensor(torch.zeros_like(gradient), mesh, [Shard(0)])})
    whole["w"].grad = distribute_tensor(gradient, mesh, [Shard(0)])
    Optimizers(named(whole), config).step()
    part = whole["w"].detach()
    assert isinstance(part, DTensor)
    return part.full_tensor()


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_in_parts_it_is_that_of_torch(scale):
    """The rate is that of the whole matrix, which is tall, and its parts are wide."""
    gradient = torch.randn(18, 10, generator=torch.Generator().manual_seed(0))
    expected = nn.Parameter(torch.zeros_like(gradient))
    expected.grad = gradient
    torch.optim.Muon([expected], lr=0.02, weight_decay=0.0, adjust_lr_fn=scale).step()
    config = Muon(lr=0.02, weight_decay=0.0, scale=scale)
    for found in run_ranks(updated_in_parts, 2, gradient, config):
        # Torch computes in bfloat16.
        assert (found - expected).norm() < 1e-2 * expected.norm()


def test_each_expert_is_a_matrix():
    """As if the experts were parameters of their own, of which one has larger gradients."""
    torch.manual_seed(0)
    start, gradient = torch.randn(2, 3, 10, 6) * torch.tensor([1.0, 100.0, 0.01]).view(3, 1, 1)
    together = nn.ParameterDict({"w": start.clone()})
    apart = nn.ParameterDict({str(e): matrix.clone() for e, matrix in enumerate(start)})
    for model in (together, apart):
        parameters = [dataclasses.replace(each, role="expert", heads=None) for each in named(model)]
        for each in parameters:
            each.tensor.grad = gradient if each.name == "w" else gradient[int(each.name)]
        Optimizers(parameters, Muon(lr=0.02, ns_dtype="float32")).step()
    torch.testing.assert_close(together["w"], torch.stack([*apart.values()]))
    assert (together["w"] - start).abs().amin() > 0


def test_a_parameter_without_a_gradient_stays():
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False))
    optimizers = Optimizers(named(model), Muon())
    before = model[1].weight.detach().clone()
    model[0](torch.ones(1, 4)).sum().backward()
    optimizers.step()
    assert torch.equal(model[1].weight, before)
    assert list(optimizers.state_dict()) == ["0.weight.momentum_buffer"]


def test_roles_have_rates_and_decay_of_their_own():
    config = Muon(lr=0.1, weight_decay=0.2)
    parts = {p.role: p for p in named(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)))}
    assert config.rule_for(parts["matrix"]) is config
    for adamw, expected in (
        (AdamWPart(), (0.1, 0.2)),
        (AdamWPart(lr=1e-3), (1e-3, 0.2)),
        (AdamWPart(weight_decay=0.0, beta2=0.5), (0.1, 0.0)),
    ):
        rule = config.model_copy(update={"adamw": adamw}).rule_for(parts["embedding"])
        assert (rule.lr, rule.weight_decay, rule.title) == (*expected, "AdamW")


def test_state_by_formula_is_the_state_there_is():
    """4 bytes for each element of a matrix, and 8 for each of the rest, but for step counts."""
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5))
    optimizers = Optimizers(named(model), Muon())
    states = optimizers.state_dict().items()
    there = sum(state.nbytes for name, state in states if not name.endswith(".step"))
    assert there == state_bytes(Muon(), named(model), 4) == 4 * 30 + 8 * (42 + 5)


@pytest.mark.parametrize("flavor", ["8B", "70B"])
def test_the_table_of_the_guide_is_the_formula(flavor):
    spec = MODELS["llama3"]
    parameters = name_parameters([build_empty(spec.build, spec.flavors[flavor], 1)], spec.role)
    gib = (state_bytes(config, parameters, 4) / GIB for config in (AdamW(), Muon()))
    row = f"| Llama 3.1 {flavor} | {' | '.join(f'{each:.1f}' for each in gib)} |"
    assert row in (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text().splitlines()


def test_compiled_it_is_the_same_for_any_number_of_shapes():
    config, compiled = Muon(), partial(torch.compile, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, n, bias=False) for n in range(2, 12)))
    results = []
    for how in (None, compiled):
        optimizers = Optimizers(named(copy.deepcopy(model)), config)
        (optimizer,) = optimizers.rules
        config.prepare(optimizer, how)
        for parameter in optimizers.names:
            parameter.grad = parameter.detach().clone()
        optimizers.step()
        results.append([parameter.detach() for parameter in optimizers.names])
    assert all(map(torch.equal, *results))


def test_the_scale_gives_the_update_the_size_of_adamws():
    """Root mean square 0.2, as far as singular values are 1; for a matrix however large."""
    torch.manual_seed(0)
    for rows, columns in ((256, 64), (64, 256), (128, 128)):
        update = newton_schulz(torch.randn(1, rows, columns), 5)
        size = Muon().factor(rows, columns) * float(update.square().mean().sqrt())
        assert math.isclose(size, 0.2, rel_tol=0.15)
        assert Muon(scale="original").factor(rows, columns) == math.sqrt(max(1, rows / columns))
