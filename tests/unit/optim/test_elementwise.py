"""Updates of parts are those of DTensors, and states are kept as DTensors."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import SGD, AdamW, Optimizer

from torchtitan.optim.adam_and_sgd import elementwise
from torchtitan.torch_private.compiler import without_compiler
from torchtitan.torch_private.fake_ranks import fake_process_group

PLACEMENTS = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Replicate())]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (AdamW, {"fused": True}),
        (AdamW, {"foreach": True}),
        (SGD, {"foreach": True, "momentum": 0.9}),
        (SGD, {"foreach": False, "momentum": 0.9}),
    ],
)
def test_an_update_of_parts_is_that_of_dtensors(kind, how):
    with fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))

        def parameters():
            torch.manual_seed(0)
            parts = [DTensor.from_local(torch.randn(3, 4), mesh, each) for each in PLACEMENTS]
            return [*map(torch.nn.Parameter, parts)]

        def steps(optimizer):
            for number in range(3):
                for p in optimizer.param_groups[0]["params"]:
                    p.grad = torch.ones_like(p) * (number - 0.5)
                optimizer.step()

        on_parts, on_wholes = parameters(), parameters()
        ours = elementwise(kind, [{"params": on_parts}], lr=0.1, weight_decay=0.1, **how)
        theirs = without_compiler(kind, [{"params": on_wholes}], lr=0.1, weight_decay=0.1, **how)
        steps(ours)
        steps(theirs)
        for one, other in zip(on_parts, on_wholes, strict=True):
            assert torch.equal(plain(one), plain(other))
            assert [*ours.state[one]] == [*theirs.state[other]]
            for name, state in theirs.state[other].items():
                kept = ours.state[one][name]
                assert torch.equal(plain(kept), plain(state))
                assert isinstance(kept, DTensor) == isinstance(state, DTensor)
                if isinstance(state, DTensor):
                    assert (kept.placements, kept.shape) == (state.placements, state.shape)


def test_a_parameter_without_a_gradient_has_no_state():
    with fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (4,))
        make = (DTensor.from_local(torch.ones(2), mesh, [Shard(0)]) for _ in range(2))
        one, other = map(torch.nn.Parameter, make)
        optimizer = elementwise(AdamW, [{"params": [one, other]}], fused=True)
        one.grad = torch.ones_like(one)
        optimizer.step()
        assert [*optimizer.state] == [one]


class Averaged(Optimizer):
    """Its average is a new tensor in each step, and its count of steps is a number."""

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state["average"] = state.get("average", 0.0) + weight.grad
            state["count"] = state.get("count", 0) + 1


def test_states_that_are_replaced_are_kept():
    with fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (4,))
        weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
        optimizer = elementwise(Averaged, [{"params": [weight]}], defaults={})
        weight.grad = torch.ones_like(weight)
        for _ in range(3):
            optimizer.step()
        state = optimizer.state[weight]
        assert state["count"] == 3
        assert isinstance(state["average"], DTensor)
        assert state["average"].shape == weight.shape
        assert plain(state["average"]).tolist() == [3.0, 3.0]


def plain(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
