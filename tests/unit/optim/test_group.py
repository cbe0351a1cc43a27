"""All parameters under one optimizer."""

import pytest
import torch
from torch import Tensor, nn

from tests.named import named
from torchtitan.optim import SGD, AdamW, OptimizerConfig, Optimizers


def train(optimizer: OptimizerConfig, steps: int, *, saved_before: bool) -> list[Tensor]:
    """Weights after some steps; their state may be asked for before the first, as by a save."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizers = Optimizers(named(model), optimizer)
    if saved_before:
        assert all(not value.any() for value in optimizers.state_dict().values())
    for _ in range(steps):
        optimizers.begin(1.0)
        model(torch.randn(5, 4)).square().sum().backward()
        optimizers.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "optimizer", [AdamW(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1)], ids=lambda o: o.name
)
def test_a_save_before_the_first_update_changes_no_later_one(optimizer: OptimizerConfig) -> None:
    expected, found = (train(optimizer, 3, saved_before=saved) for saved in (False, True))
    assert all(map(torch.equal, found, expected))
