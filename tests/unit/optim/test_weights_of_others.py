"""Weights that others write after an update, or load, are those that the next update changes."""

from functools import partial

import pytest
import torch
from torch import nn

from tests.tiny import named
from torchtitan.config import Context, PlannedWorld
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.optim import OPTIMIZERS, Optimizers
from torchtitan.optim.adam_and_sgd import STATE_DTYPES
from torchtitan.optim.optimizer_group import InBackward
from torchtitan.step import StepOptimizers
from torchtitan.timeline import Timeline

WAYS = {"plain": {}, "compiled": {}, "in the backward": {"early_step_in_backward": True}}
STORAGES = [name for name in STATE_DTYPES if name != "parameter"]
for storage in STORAGES:
    few = {"state_dtype": storage}
    WAYS |= {
        storage: few,
        f"{storage}, in the backward": {**few, "early_step_in_backward": True},
        f"{storage} part": {"adamw": few},
    }
RATE = 1e-3
FAR = 5.0
"""Much farther than updates at this rate take a weight."""


def is_accepted(kind, settings):
    if not settings.keys() <= kind.model_fields.keys():
        return False
    world = PlannedWorld(1, "cuda")
    found = kind(**settings).problems(Context(JobConfig(), world))
    return all(problem.severity == "note" for problem in found)


CASES = [
    (name, way)
    for name, kind in OPTIMIZERS.items()
    for way, settings in WAYS.items()
    if is_accepted(kind, settings)
]


def opened(name, way):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    config = OPTIMIZERS[name](lr=RATE, weight_decay=0.0, **WAYS[way])
    optimizers: Optimizers
    if config.early_step_in_backward:
        optimizers = InBackward(named(network), config, None)
    else:
        optimizers = Optimizers(named(network), config)
    if way == "compiled":
        for optimizer, rule in optimizers.rules.items():
            rule.prepare(optimizer, partial(torch.compile, backend="eager"))
    return network, optimizers


def weights(network):
    return [parameter.detach().clone() for parameter in network.parameters()]


def backward(network, optimizers):
    optimizers.begin(1.0)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(p.shape, generator=generator) for p in network.parameters()]
    pairs = zip(network.parameters(), gradients, strict=True)
    torch.stack([(parameter * gradient).sum() for parameter, gradient in pairs]).sum().backward()
    optimizers.norm()


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """What torchao would compile takes a minute."""
    monkeypatch.setattr("torch.compile", lambda function, **_: function)


def broken(check):
    """The cases that a check fails, and how."""
    found = {}
    for case in CASES:
        try:
            check(*case)
        except AssertionError as error:
            found[case] = str(error)
    return found


def check_after_a_write(name, way):
    def write():
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(FAR)

    network, inner = opened(name, way)
    optimizers = StepOptimizers(inner, 0.0, Timeline(Device("cpu")))
    optimizers.after_update = [write]
    before = weights(network)
    for _ in range(3):
        backward(network, optimizers)
        optimizers.step(torch.tensor(0.0), 0.0)
    for found, was in zip(weights(network), before, strict=True):
        torch.testing.assert_close(found, was + 3 * FAR, rtol=0, atol=FAR / 10)
        assert not torch.equal(found, was + 3 * FAR)


def test_weights_written_after_an_update_are_updated_next():
    assert not broken(check_after_a_write)


def check_after_a_load(name, way):
    network, inner = opened(name, way)
    optimizers = StepOptimizers(inner, 0.0, Timeline(Device("cpu")))

    def step():
        backward(network, optimizers)
        optimizers.step(torch.tensor(0.0), 0.0)

    step()
    saved = {key: tensor.clone() for key, tensor in inner.state_dict().items()}
    before = weights(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(FAR)
    for key, tensor in inner.state_dict().items():
        tensor.copy_(saved[key])
    inner.load_state_dict(saved)
    step()
    for found, was in zip(weights(network), before, strict=True):
        torch.testing.assert_close(found, was + FAR, rtol=0, atol=FAR / 10)
        assert not torch.equal(found, was + FAR)


def test_weights_that_are_loaded_are_updated_next():
    assert not broken(check_after_a_load)


def test_the_cases_include_every_optimizer():
    assert {name for name, _ in CASES} == OPTIMIZERS.keys()
    assert {("AdamW", way) for way in ("in the backward", *STORAGES)} <= {*CASES}
