"""States in host memory: on a CPU, where host and device are one, the same to the bit."""

import pytest
import torch
from torch import nn

from tests.named import named
from torchtitan.device import Device
from torchtitan.optim import SGD, Adam, AdamW, OptimizerConfig, Optimizers
from torchtitan.optim.offload import Offloaded


def opened(config: OptimizerConfig, *, offload: bool) -> tuple[nn.Module, Optimizers]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    if offload:
        return network, Offloaded(named(network), config, None, Device("cpu"))
    return network, Optimizers(named(network), config)


def train(network: nn.Module, optimizers: Optimizers, steps: range) -> list[torch.Tensor]:
    for step in steps:
        torch.manual_seed(step)
        optimizers.begin(1 / (step + 1))
        network(torch.randn(5, 8)).square().sum().backward()
        optimizers.clip(1.0, optimizers.norm())
        optimizers.step()
    return [parameter.detach().clone() for parameter in network.parameters()]


CONFIGS = [
    AdamW(lr=0.1, no_weight_decay_on=("norms",)),
    Adam(lr=0.1, implementation="foreach"),
    SGD(lr=0.1, momentum=0.9),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_it_is_the_plain_optimizer(config: OptimizerConfig) -> None:
    expected, found = (train(*opened(config, offload=o), range(4)) for o in (False, True))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("then_offload", [False, True])
def test_its_checkpoint_is_that_of_the_plain_one(
    then_offload: bool, config: OptimizerConfig
) -> None:
    expected = train(*opened(config, offload=False), range(5))
    network, optimizers = opened(config, offload=not then_offload)
    train(network, optimizers, range(3))
    again, loaded = opened(config, offload=then_offload)
    train(again, loaded, range(1))  # the host's weights are not those that are loaded
    again.load_state_dict(network.state_dict())
    given, saved = loaded.state_dict(), optimizers.state_dict()
    assert given.keys() == saved.keys()
    for name, tensor in given.items():
        tensor.copy_(saved[name])
    loaded.load_state_dict(given)
    assert all(map(torch.equal, train(again, loaded, range(3, 5)), expected))
