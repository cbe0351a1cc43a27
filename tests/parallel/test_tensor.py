"""Tensor parallelism of single modules: gradients are those of one rank."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.ranks import run_ranks
from torchtitan.parallel.tensor import apply, redistribute_grads

HEADS, FEATURES = 4, 8
DIM = HEADS * FEATURES


class Attention(nn.Module):
    """Queries that are normalised in each head, without what attends."""

    def __init__(self):
        super().__init__()
        self.wq, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.q_norm = nn.RMSNorm(FEATURES)

    def forward(self, x):
        found = self.q_norm(self.wq(x).unflatten(-1, (-1, FEATURES)))
        return self.wo(found.square().flatten(2))


class Block(nn.Module):
    """The end of a stream, and an attention in it."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(DIM), Attention()
        self.end = nn.RMSNorm(DIM)

    def forward(self, x):
        return self.end(self.attention(self.norm(x)))


def trained(sequence_parallel, role, ranks):
    """The gradients of the first step, and the weights after three of SGD."""
    torch.manual_seed(0)
    block, x, target = Block(), *torch.randn(2, 2, 6, DIM)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        plan = {
            "norm": "norm",
            "attention": "input_gather",
            "attention.wq": "colwise",
            "attention.q_norm": role,
            "attention.wo": "rowwise",
            "end": "norm",
        }
        whole = [parameter.detach().clone() for parameter in block.parameters()]
        apply(block, plan, mesh, sequence_parallel=sequence_parallel, loss_parallel=False)
        with torch.no_grad():
            from torch.distributed.tensor import distribute_tensor

            for parameter, value in zip(block.parameters(), whole, strict=True):
                placements = parameter.placements
                parameter.copy_(distribute_tensor(value, mesh, placements))
        if sequence_parallel:
            x, target = (t.chunk(ranks, 1)[mesh.get_local_rank()] for t in (x, target))
    optimizer, first = torch.optim.SGD(block.parameters(), lr=0.01), list[Tensor]()
    for _ in range(3):
        optimizer.zero_grad()
        (block(x) - target).square().sum().backward()
        redistribute_grads(block.parameters())
        first = first or [_whole(p.grad) for p in block.parameters() if p.grad is not None]
        optimizer.step()
    return first + [_whole(parameter.detach()) for parameter in block.parameters()]


def _whole(tensor):
    return getattr(tensor, "full_tensor", tensor.clone)()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_gradient_of_a_norm_in_heads_is_that_of_one_rank(sequence_parallel):
    (expected,) = run_ranks(trained, 1, sequence_parallel, "head_norm", 1)
    for found in run_ranks(trained, 2, sequence_parallel, "head_norm", 2):
        for mine, one in zip(found, expected, strict=True):
            assert (mine - one).norm() / one.norm() < 1e-5


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_norm_of_the_stream_is_not_taken_for_one_in_heads(sequence_parallel):
    with pytest.raises(AssertionError, match=r"RMSNorm.* has the role norm, .* received 4"):
        run_ranks(trained, 2, sequence_parallel, "norm", 2)


def redistributed():
    """Redistributions of two gradients, of which one lacks a sum, and the gradients after them."""
    mesh = init_device_mesh("cpu", (2,))
    weights, calls = [], []
    for kept, given in ((Shard(0), Shard(0)), (Replicate(), Partial())):
        weights.append(nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [kept])))
        weights[-1].grad = DTensor.from_local(torch.ones(2), mesh, [given])
    redistribute = DTensor.redistribute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DTensor, "redistribute", lambda *a, **b: calls.append(a) or redistribute(*a, **b)
        )
        redistribute_grads(weights)
    return len(calls), [float(weight.grad.to_local()[0]) for weight in weights]


def test_gradients_that_are_placed_like_their_weights_stay():
    assert run_ranks(redistributed, 2) == [(1, [1.0, 2.0])] * 2
