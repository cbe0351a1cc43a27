"""Replicas that train independently, and an outer optimizer for the mean of their changes."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from torchtitan.comm import Unit
from torchtitan.research.diloco import DiLoCo

SHAPES = {"w": torch.Size([6, 4]), "b": torch.Size([3])}
ROUNDS = 4


def moved(call, rank):
    generator = torch.Generator().manual_seed(10 * call + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def agreed(config):
    """What replicas agree on in each round, of their shares of the mean."""
    group = dist.group.WORLD
    way = config.open(Unit("", SHAPES, torch.device("cpu")), group)
    found = []
    for call in range(ROUNDS):
        changes = {n: m / group.size() for n, m in moved(call, group.rank()).items()}
        way(changes)
        found.append(changes)
    return found


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0)])
def test_weights_are_those_of_torchs_sgd_with_nesterov_momentum(lr, momentum):
    """Whose gradient is the mean of the changes; without momentum, and with rate 1, their mean."""
    found = run_ranks(agreed, 2, DiLoCo(outer_lr=lr, outer_momentum=momentum))
    for name, shape in SHAPES.items():
        ours, theirs = torch.zeros(shape), torch.nn.Parameter(torch.zeros(shape))
        outer = torch.optim.SGD([theirs], lr, momentum, nesterov=momentum > 0)
        for call in range(ROUNDS):
            theirs.grad = (moved(call, 0)[name] + moved(call, 1)[name]) / 2
            outer.step()
            ours -= found[0][call][name]
            assert torch.allclose(ours, theirs, atol=1e-5)
            assert torch.equal(found[0][call][name], found[1][call][name])
