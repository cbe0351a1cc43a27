"""All parameters under one optimizer: its updates are those of torch, and its settings by group."""

import pytest
import torch
from torch import nn

from tests.tiny import named
from torchtitan.optim import SGD, Adam, AdamW, Muon, Optimizers
from torchtitan.optim.muon import AdamWPart
from torchtitan.optim.optimizer_group import InBackward
from torchtitan.optim.parameters import global_norm

BUILDERS = {"plain": Optimizers, "in the backward": lambda p, config: InBackward(p, config, None)}
IDS = torch.tensor([[0, 3, 3, 1], [2, 2, 4, 0]])
FACTORS = (0.5, 1.0, 0.25)
"""Factors of the schedule in three steps."""


def network():
    """A table, a matrix and a bias: of the roles embedding, matrix and norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))


def train(model, begin, step):
    """Weights after three steps at the rates of a schedule."""
    for factor in FACTORS:
        begin(factor)
        model(IDS).square().sum().backward()
        step()
    return [parameter.detach() for parameter in model.parameters()]


def by_torch(kind, *groups):
    """The same of an optimizer of torch; the groups are of the table, the matrix and the bias."""
    model = network()
    optimizer = kind(
        [{"params": [p], **group} for p, group in zip(model.parameters(), groups, strict=True)]
    )
    peaks = [group["lr"] for group in optimizer.param_groups]

    def begin(factor):
        optimizer.zero_grad()
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor

    return train(model, begin, optimizer.step)


def by_ours(config, build=Optimizers):
    model = network()
    optimizers = build(named(model), config)
    return train(model, optimizers.begin, optimizers.step)


def test_updates_are_those_of_torch():
    """Each number another, so that none can stand for another."""
    common = {"lr": 0.05, "weight_decay": 0.3}
    adam = {"beta1": 0.8, "beta2": 0.97, "eps": 0.02}
    torchs = common | {"betas": (0.8, 0.97), "eps": 0.02}
    momentum = common | {"momentum": 0.7}
    for config, kind, options in (
        *((AdamW(**common, **adam, implementation=how), torch.optim.AdamW, torchs) for how in HOW),
        *((Adam(**common, **adam, implementation=how), torch.optim.Adam, torchs) for how in HOW),
        (SGD(**common), torch.optim.SGD, common),
        (SGD(**momentum), torch.optim.SGD, momentum),
        (SGD(**momentum, nesterov=True), torch.optim.SGD, momentum | {"nesterov": True}),
    ):
        torch.testing.assert_close(by_ours(config), by_torch(kind, options, options, options))


HOW = ("fused", "foreach", "for-loop")


@pytest.mark.parametrize("way", BUILDERS)
def test_groups_are_those_of_torch(way):
    """What a group says wins, over `no_weight_decay_on` as well; the rest is the optimizer's."""
    groups = [
        {"names": ["0.*"], "lr_factor": 2.0, "weight_decay": 0.7},
        {"roles": ["matrix", "embedding"], "lr_factor": 0.5},
    ]
    adam = [{"beta1": 0.6, "eps": 0.1}, {"beta2": 0.8}]
    keys = {"lr": 0.05, "weight_decay": 0.3, "no_weight_decay_on": ["norms", "embeddings"]}
    keys["groups"] = [group | more for group, more in zip(groups, adam, strict=True)]
    config = AdamW.model_validate(keys)
    expected = by_torch(
        torch.optim.AdamW,
        {"lr": 0.1, "weight_decay": 0.7, "betas": (0.6, 0.95), "eps": 0.1},
        {"lr": 0.025, "weight_decay": 0.3, "betas": (0.9, 0.8), "eps": 1e-8},
        {"lr": 0.05, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8},
    )
    torch.testing.assert_close(by_ours(config, BUILDERS[way]), expected)


def test_groups_change_the_rule_of_their_parameters():
    """With two rules: rates are multiples of the rate of each, and decay that of each."""
    keys = {"lr": 0.3, "weight_decay": 0.2, "no_weight_decay_on": ["norms"]}
    keys["groups"] = [{"roles": ["embedding", "matrix"], "lr_factor": 0.5}]
    config = Muon.model_validate(keys | {"adamw": AdamWPart(lr=0.05, weight_decay=0.1)})
    rules = {a.parameter.name: a.rule for a in Optimizers(named(network()), config).assignments}
    assert {name: (rule.title, rule.lr, rule.weight_decay) for name, rule in rules.items()} == {
        "0.weight": ("AdamW", 0.025, 0.1),
        "1.weight": ("Muon", 0.15, 0.2),
        "1.bias": ("AdamW", 0.05, 0.0),
    }


def test_clipping_is_that_of_torch():
    for most in (0.3, 1e9):
        model = network()
        optimizers = Optimizers(named(model), SGD())
        model(IDS).square().sum().backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in expected]).sum().sqrt()
        torch.testing.assert_close(optimizers.norm().complete(), norm)
        optimizers.clip(most, optimizers.norm().complete())
        wanted = [gradient * min(1.0, most / norm.item()) for gradient in expected]
        torch.testing.assert_close(optimizers.gradients(), wanted)


def test_the_norm_of_bfloat16_is_computed_in_float32():
    gradients = [torch.full((1000,), 0.1, dtype=torch.bfloat16), torch.ones(3)]
    exact = (1000 * float(gradients[0][0]) ** 2 + 3) ** 0.5
    torch.testing.assert_close(global_norm(gradients), torch.tensor(exact))


@pytest.mark.parametrize(
    "config", [AdamW(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1)], ids=lambda o: o.name
)
def test_a_save_before_the_first_update_changes_no_later_one(config):
    model = network()
    optimizers = Optimizers(named(model), config)
    assert all(not value.any() for value in optimizers.state_dict().values())
    found = train(model, optimizers.begin, optimizers.step)
    assert all(map(torch.equal, found, by_ours(config)))


def test_tables_and_biases_can_go_without_decay():
    config = AdamW(lr=0.05, weight_decay=0.3, no_weight_decay_on=("norms", "embeddings"))
    common = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8}
    decays = [common | {"weight_decay": decay} for decay in (0.0, 0.3, 0.0)]
    torch.testing.assert_close(by_ours(config), by_torch(torch.optim.AdamW, *decays))
