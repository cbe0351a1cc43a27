"""Ranger21 against its rules written down again in numpy, one addition at a time; against AdamW, to
the bit, where none is on; and against pytorch-optimizer's, where that does the same."""

import itertools
import warnings
from functools import partial

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch import nn

from tests.tables import data
from tests.tiny import named
from torchtitan.job import JobConfig
from torchtitan.optim import AdamW, Optimizers
from torchtitan.research.ranger21 import Ranger21, Ranger21Schedule

SWITCHES = ("centralize_gradients", "normalize_gradients", "positive_negative_momentum")
SWITCHES += ("stable_weight_decay", "amsgrad")
NONE = ("adaptive_clip", "norm_loss", "softplus", "lookahead_steps")
OFF = dict.fromkeys(SWITCHES, False) | dict.fromkeys(NONE, 0)
ON = data(__file__)
NUMBERS = {"lr": 1e-2, "weight_decay": 0.5, "beta1": 0.8, "beta2": 0.9}
EVERYTHING = {key: value for one in ON.values() for key, value in one.items()}
TO_NORM_1 = {"stable_weight_decay": True, "decay_to_norm_1": True}
"""The paper's one term, in place of decay and norm loss."""
STEPS = 8


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 40), nn.Linear(40, 33), nn.LayerNorm(33))


def gradients(step, model):
    """Smaller from step to step, so that a maximum is one; rows of zeros, and rows of a mean."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator) / (1 + step)
        if gradient.ndim == 2:
            gradient[: 2 + step] = 0
            gradient[-4:] += 3
        found.append(gradient)
    return found


def drive(model, update, begin=lambda: None, steps=range(STEPS)):
    for step in steps:
        begin()
        for parameter, gradient in zip(model.parameters(), gradients(step, model), strict=True):
            parameter.grad = gradient.clone()
        update()
    return model


def trained(config, steps=STEPS):
    model = network()
    optimizers = Optimizers(named(model), config)
    for step in range(steps):
        drive(model, optimizers.step, partial(optimizers.begin, 1), [step])
        for parameter, gradient in zip(model.parameters(), gradients(step, model), strict=True):
            assert torch.equal(parameter.grad, gradient)  # it is looked at after a step
    return [parameter.detach() for parameter in model.parameters()]


def by_numpy(given, first_sum=0.0):
    """The same in float64, one element-wise rule after the other, with no sum that is reused."""
    c = Ranger21(**given).model_dump()
    model = network()
    weights = [p.detach().double().numpy().copy() for p in model.parameters()]
    rows = [tuple(range(1, w.ndim)) or (0,) for w in weights]
    odd, even, second, highest = ([np.zeros_like(w) for w in weights] for _ in range(4))
    slow = [w.copy() for w in weights]
    lr, wd, beta0, beta1, beta2 = (c[k] for k in ("lr", "weight_decay", "beta0", "beta1", "beta2"))
    for t in range(1, STEPS + 1):
        grads = [g.double().numpy() for g in gradients(t - 1, model)]
        total, count = first_sum, 0
        for i, (g, w) in enumerate(zip(grads, weights, strict=True)):
            if c["adaptive_clip"]:
                size = np.sqrt((g**2).sum(rows[i], keepdims=True))
                own = np.sqrt((w**2).sum(rows[i], keepdims=True))
                limit = c["adaptive_clip"] * np.maximum(own, c["adaptive_clip_norm"])
                g = np.where(size > limit, g * limit / np.maximum(size, 1e-6), g)
            if c["centralize_gradients"] and g.ndim > 1:
                g = g - g.mean(rows[i], keepdims=True)
            if c["normalize_gradients"]:
                g = g / (g.std(ddof=1) + 1e-8)
            grads[i] = g
            second[i] = beta2 * second[i] + (1 - beta2) * g**2
            total += (second[i] / (1 - beta2**t)).sum()
            count += g.size
        sigma = np.sqrt(total / count) if c["stable_weight_decay"] else 1.0
        for i, g in enumerate(grads):
            w = weights[i]
            norm = np.sqrt((w**2).sum(rows[i], keepdims=True)) + c["eps"]
            w = w * (1 - lr * wd / sigma * (1 - 1 / norm if c["decay_to_norm_1"] else 1))
            norm = np.sqrt((w**2).sum(rows[i], keepdims=True))
            w = w - lr * 2 * c["norm_loss"] * (1 - 1 / (norm + c["eps"])) * w
            if c["positive_negative_momentum"]:
                mine, other = (odd, even) if t % 2 else (even, odd)
                mine[i] = beta1**2 * mine[i] + (1 - beta1**2) * g
                direction = (1 + beta0) * mine[i] - beta0 * other[i]
                direction = direction / np.sqrt((1 + beta0) ** 2 + beta0**2)
            else:
                odd[i] = direction = beta1 * odd[i] + (1 - beta1) * g
            highest[i] = np.maximum(highest[i], second[i])
            v = highest[i] if c["amsgrad"] else second[i]
            d = np.sqrt(v / (1 - beta2**t)) + c["eps"]
            if c["softplus"]:
                d = np.log1p(np.exp(-c["softplus"] * d)) / c["softplus"] + d
            w = w - lr / (1 - beta1**t) * direction / d
            if c["lookahead_steps"] and t % c["lookahead_steps"] == 0:
                w = c["lookahead_alpha"] * w + (1 - c["lookahead_alpha"]) * slow[i]
                slow[i] = w.copy()
            weights[i] = w
    return weights


def off(found, expected):
    return max(np.abs(f.double().numpy() - e).max() for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [*ON, "decay to the norm 1"])
def test_each_addition(name):
    given = NUMBERS | OFF | ON.get(name, TO_NORM_1)
    found = trained(Ranger21(**given))
    assert off(found, by_numpy(given)) < 1e-6
    # The comparison means something: the addition is seen in the weights.
    if name != "nothing":
        assert off(found, by_numpy(NUMBERS | OFF)) > 1e-4


def test_all_additions():
    given = NUMBERS | EVERYTHING
    found = trained(Ranger21(**given))
    assert off(found, by_numpy(given)) < 1e-6
    for name, one in list(ON.items())[1:]:
        without = {key: OFF.get(key, value) for key, value in one.items()}
        # Normalized gradients have a root mean square of about 1, so stable decay changes little.
        assert off(found, by_numpy(given | without)) > 2e-5, name


def test_nothing_on_is_adamw_to_the_bit():
    ours = trained(Ranger21(**NUMBERS, **OFF))
    assert all(map(torch.equal, ours, trained(AdamW(**NUMBERS))))
    model = network()
    theirs = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.5, fused=True
    )
    drive(model, theirs.step)
    assert all(map(torch.equal, ours, model.parameters()))


@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
def test_an_addition_that_is_never_due_leaves_adamw_to_the_bit(implementation):
    """Its own arithmetic is AdamW's too, which the fused kernel rounds otherwise."""
    given = NUMBERS | OFF | {"lookahead_steps": 1000}
    expected = trained(AdamW(**NUMBERS, implementation=implementation))
    assert all(map(torch.equal, trained(Ranger21(**given)), expected))
    maximum = trained(Ranger21(**NUMBERS, **OFF | {"amsgrad": True}))
    model = network()
    kind = {"foreach": implementation == "foreach", "amsgrad": True}
    theirs = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.5, **kind
    )
    drive(model, theirs.step)
    assert all(map(torch.equal, maximum, model.parameters()))


def test_as_in_pytorch_optimizer():
    """Theirs differs in two ways: it begins the sum of second moments with 1, so numpy's is the
    link between the two; and it centralizes and normalizes each gradient a second time, which
    changes what rounding left.
    """
    with warnings.catch_warnings(action="ignore"):
        from pytorch_optimizer import Ranger21 as Theirs
    given = NUMBERS | EVERYTHING
    model = network()
    theirs = Theirs(
        model.parameters(),
        num_iterations=STEPS,
        lr=given["lr"],
        beta0=given["beta0"],
        betas=(given["beta1"], given["beta2"]),
        beta_softplus=given["softplus"],
        disable_lr_scheduler=True,
        agc_clipping_value=given["adaptive_clip"],
        agc_eps=given["adaptive_clip_norm"],
        lookahead_merge_time=given["lookahead_steps"],
        lookahead_blending_alpha=given["lookahead_alpha"],
        weight_decay=given["weight_decay"],
        norm_loss_factor=given["norm_loss"],
    )
    drive(model, theirs.step)
    found = [parameter.detach() for parameter in model.parameters()]
    assert off(found, by_numpy(given, first_sum=1.0)) < 1e-6
    assert off(found, by_numpy(given)) > 1e-6
    assert off(trained(Ranger21(**given)), by_numpy(given)) < 1e-6


def test_a_gradient_of_zeros_changes_no_weight_but_by_the_norm():
    model = network()
    optimizers = Optimizers(named(model), Ranger21(norm_loss=0.0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(6):
        optimizers.begin(1)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizers.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("left", range(5))
def test_what_is_kept(left):
    switches = {"positive_negative_momentum": True, "amsgrad": True, "lookahead_steps": 5}
    given = OFF | dict(list(switches.items())[:left])
    config = Ranger21(**given)
    model = network()
    optimizers = Optimizers(named(model), config)
    optimizers.begin(1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step()
    states = dict(optimizers.states())
    elements = sum(parameter.numel() for parameter in model.parameters())
    kept = sum(state.numel() for name, state in states.items() if not name.endswith(".step"))
    assert kept == elements * config.state_bytes(4) / 4 == elements * (2 + min(left, 3))
    assert {name.rpartition(".")[2] for name in states} == config.state_names()


def test_resumed_in_the_middle_of_a_lookahead_period_to_the_bit():
    """Period and parity of the momentum follow from the step, which is a state like others."""
    config = Ranger21(lr=1e-2, lookahead_steps=3)
    whole = trained(config, 7)
    model = network()
    optimizers = Optimizers(named(model), config)
    for step in range(7):
        if step in (1, 4, 5):
            saved = {name: state.clone() for name, state in optimizers.state_dict().items()}
            weights = {name: weight.clone() for name, weight in model.state_dict().items()}
            model = network()
            optimizers = Optimizers(named(model), config)
            given = optimizers.state_dict()
            model.load_state_dict(weights)
            for name, state in given.items():
                state.copy_(saved[name])
            optimizers.load_state_dict(given)
        drive(model, optimizers.step, partial(optimizers.begin, 1), [step])
    assert all(map(torch.equal, whole, model.parameters()))


def test_decay_to_norm_1_is_that_of_the_paper():
    """w -= lr wd (|w| - 1) / (|w| sigma) w, where only the decay changes a weight."""
    config = Ranger21(**NUMBERS | OFF | TO_NORM_1 | {"beta1": 0.0})
    model = nn.Linear(3, 2, bias=False)
    model.weight.data = torch.tensor([[3.0, 0.0, 4.0], [0.0, 0.1, 0.0]])
    optimizers = Optimizers(named(model), config)
    optimizers.begin(1)
    # Its root mean square is 2, and the update is the rate where it is not 0.
    model.weight.grad = torch.tensor([[0.0, 24**0.5, 0.0], [0.0, 0.0, 0.0]])
    optimizers.step()
    pull = 1e-2 * 0.5 / 2
    expected = [[3 * (1 - pull * 0.8), -1e-2, 4 * (1 - pull * 0.8)], [0, 0.1 * (1 + pull * 9), 0]]
    torch.testing.assert_close(model.weight.data, torch.tensor(expected))


@pytest.mark.parametrize("steps", [100, 1000, 4400, 20000])
def test_schedule_of_ranger21(steps):
    """As pytorch-optimizer has it, to two steps of the decay: theirs begins one step earlier, and
    ends with the last step where every schedule here ends just after it. Between 4,445 and 9,090
    steps, theirs warms up for 2,000, as the authors' code does.
    """
    weights = [torch.zeros(1, requires_grad=True)]
    theirs = pytorch_optimizer.Ranger21(weights, num_iterations=steps, lr=1e-3)
    job = JobConfig.model_validate(
        {"lr_scheduler": {"name": "ranger21"}, "training": {"steps": steps}}
    )
    warmup = {100: 22, 1000: 220, 4400: 968, 20000: 2000}[steps]
    decay = round(0.28 * steps)
    assert job.lr_scheduler.shares(steps) == (warmup, decay)
    for step in range(1, steps + 1):
        rate = theirs.warm_down(theirs.warm_up_dampening(1e-3, step), step)
        assert abs(job.learning_rate_factor(step) - rate / 1e-3) <= 2 / decay
    assert job.learning_rate_factor(warmup) == job.learning_rate_factor(steps - decay + 1) == 1
    assert job.learning_rate_factor(steps + 1) == pytest.approx(0.03)


def test_numbers_of_ranger21s_schedule():
    assert Ranger21Schedule(warmup_steps=10, decay_ratio=0.5).shares(100) == (10, 50)
    assert Ranger21Schedule(warmup_steps=21).shares(100) == (21, 28)
    assert Ranger21Schedule(warmup_steps=46).shares(100) == (22, 28)
    assert Ranger21Schedule(warmup_steps=0, decay_ratio=None).shares(10) == (0, 10)


def test_warm_up_grows_with_the_schedule_without_a_jump():
    """It is the shorter of 2,000 steps and 22 %, as in the paper."""
    schedule = Ranger21Schedule()
    warmups = [schedule.shares(steps)[0] for steps in range(4000, 10000)]
    assert {late - early for early, late in itertools.pairwise(warmups)} == {0, 1}
    assert (warmups[444], warmups[445], warmups[-1]) == (977, 977, 2000)
