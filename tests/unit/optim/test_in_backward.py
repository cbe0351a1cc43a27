"""Updates in the backward: the same numbers, with few gradients alive at a time."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_ranks
from tests.tiny import named
from torchtitan.optim import SGD, AdamW, Optimizers
from torchtitan.optim.optimizer_group import InBackward


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def train(model, optimizers):
    """The weights at the end, and the norm of each step."""
    norms = []
    for step in range(4):
        torch.manual_seed(step)
        optimizers.begin(1 / (step + 1))
        model(torch.randn(5, 64)).square().sum().backward()
        norms.append(optimizers.norm().complete().item())
        optimizers.step()
    return [parameter.detach() for parameter in model.parameters()], norms


CONFIGS = [AdamW(lr=0.1, no_weight_decay_on=("norms",)), SGD(lr=0.01, momentum=0.9)]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_is_the_step_after_the_backward(config):
    is_the_step_after_the_backward(config)


def is_the_step_after_the_backward(config):
    torch.compiler.set_stance("force_eager")
    after, during = network(), network()
    expected, norms = train(after, Optimizers(named(after), config))
    found, same_norms = train(during, InBackward(named(during), config, None))
    assert all(map(torch.equal, found, expected))
    assert same_norms == norms
    torch.compiler.set_stance("default")


def norms_of_stages():
    """The norm of gradients 3 on the first stage and 4 on the second, updated either way."""
    found, stages = [], dist.group.WORLD
    for build in (Optimizers, InBackward):
        weight = nn.Linear(1, 1, bias=False)
        optimizers = build(named(weight), SGD(), stages=stages)
        (weight.weight * (3 + dist.get_rank())).sum().backward()
        found.append(optimizers.norm().complete().item())
    return found


def test_the_norm_is_that_of_all_stages():
    assert run_ranks(norms_of_stages, 2) == [[5.0, 5.0]] * 2


def test_one_gradient_is_alive_at_a_time():
    one_gradient_is_alive_at_a_time(AdamW())


def one_gradient_is_alive_at_a_time(config):
    torch.compiler.set_stance("force_eager")
    alive = []
    model = network()

    def count(_):
        alive.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    train(model, InBackward(named(model), config, None))
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert len(alive) == 4 * 12
    assert max(alive) == largest
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.compiler.set_stance("default")
