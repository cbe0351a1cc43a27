"""The mixture of experts against its formula, token by token, and products of experts."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from torchtitan.models.experts import (
    MixtureOfExperts,
    Router,
    Routing,
    expert_gradients,
    expert_products,
)

SIZES = (16, 6, 24)  # D, E, F: all different
# Torch has no grouped product in float64.
grouped_or_not = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["grouped", "one by one"]
)


def layer(dtype=torch.float32, shared_dim=0, **rule):
    routing = Routing(**{"top_k": 3, **rule})
    made = MixtureOfExperts(*SIZES, routing, shared_dim=shared_dim).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return made


def tokens(dtype=torch.float32, count=20):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, count // 2, SIZES[0], generator=generator).to(dtype).requires_grad_()


def best(rule, values):
    """The experts with the largest values, in the groups whose best two have the largest sums."""
    numbers, size = range(len(values)), len(values) // rule.groups
    groups = [numbers[g * size : (g + 1) * size] for g in range(rule.groups)]

    def of_group(group):
        return -sum(sorted((values[e].item() for e in group), reverse=True)[:2])

    allowed = [e for group in sorted(groups, key=of_group)[: rule.top_groups] for e in group]
    return sorted(sorted(allowed), key=lambda e: -values[e].item())[: rule.top_k]


def by_formula(made, x):
    """The module's formula, one token and one expert at a time."""
    router, experts, rule = made.router, made.experts, made.router.routing
    rows = []
    for token in x.flatten(0, 1):
        logits = router.weight @ token
        all_scores = logits.softmax(0) if rule.scores == "softmax" else logits.sigmoid()
        chosen = best(rule, all_scores if router.bias is None else all_scores + router.bias)
        scores = all_scores[chosen]
        scores = rule.scale * (scores / scores.sum() if rule.renormalizes else scores)
        parts = [
            experts.w2[e] @ (F.silu(experts.w1[e] @ token) * (experts.w3[e] @ token))
            for e in chosen
        ]
        rows.append(sum(score * part for score, part in zip(scores, parts, strict=True)))
    out = torch.stack(rows).view_as(x)
    return out if made.shared is None else out + made.shared(x)


@grouped_or_not
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"scores": "sigmoid"},
        {"renormalizes": False},
        {"shared_dim": 8},
        {"scores": "sigmoid", "has_bias": True, "scale": 2.5},
        {"has_bias": True, "groups": 3, "top_groups": 2},
        {"scores": "sigmoid", "groups": 3, "top_groups": 2},
    ],
    ids=["softmax", "sigmoid", "not renormalized", "shared", "bias", "groups", "groups, no bias"],
)
def test_it_is_the_formula(how, dtype):
    made = layer(dtype, **how)
    if made.router.bias is not None:
        made.router.bias.copy_(torch.tensor([-1.0, 0.6, 0.0, 0.1, -0.4, 0.5]))
    x, same = tokens(dtype), tokens(dtype)
    found, expected = made(x), by_formula(made, same)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weights = list(made.parameters())
    gradients = torch.autograd.grad(found.square().sum(), [x, *weights])
    wanted = torch.autograd.grad(expected.square().sum(), [same, *weights])
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_are_those_of_each_expert_also_without_rows(dtype):
    generator = torch.Generator().manual_seed(2)
    ends = torch.tensor([0, 5, 5, 6, 20, 20], dtype=torch.int32)
    x = torch.randn(20, 16, generator=generator).to(dtype)
    weight = torch.randn(6, 24, 16, generator=generator).to(dtype)
    grad = torch.randn(20, 24, generator=generator).to(dtype)
    spans = [slice(*bounds) for bounds in pairwise([0, *ends.tolist()])]
    expected = (
        torch.cat([x[rows] @ weight[e].t() for e, rows in enumerate(spans)]),
        torch.stack([grad[rows].t() @ x[rows] for rows in spans]),
    )
    assert expected[1][0].eq(0).all()
    assert not expected[1][1].eq(0).all()
    found = expert_products(x, weight, ends), expert_gradients(grad, x, ends)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1.6e-2 if x.itemsize < 4 else 0)


@grouped_or_not
def test_operators_keep_the_contract_of_the_compiler(dtype):
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)
    x = torch.randn(10, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 12, 8, dtype=dtype, requires_grad=True)
    torch.library.opcheck(expert_products, (x, weight, ends))
    torch.library.opcheck(expert_gradients, (torch.randn(10, 12, dtype=dtype), x.detach(), ends))


def test_gradients_in_float64_and_a_size_that_is_not_aligned_are_looped(caplog):
    caplog.set_level("INFO")
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(expert_products, (x, weight, ends))
    assert "no grouped product for 2 x 3 matrices in float64, so experts are" in caplog.text
    narrow = expert_products(x.float(), weight.float(), ends)
    torch.testing.assert_close(narrow.double(), expert_products(x, weight, ends))
    assert "matrices in float32" in caplog.text


def test_of_equal_logits_the_first_experts_are_chosen():
    router = Router(4, 8, Routing(top_k=3))
    with torch.no_grad():
        router.weight.zero_()[5] = 1.0
    scores, chosen = router(torch.tensor([[[1.0, 0, 0, 0], [0, 0, 0, 0], [-1.0, 0, 0, 0]]]))
    assert chosen.tolist() == [[[5, 0, 1], [0, 1, 2], [0, 1, 2]]]
    torch.testing.assert_close(scores.sum(-1), torch.ones(1, 3))


def test_scores_are_computed_and_applied_in_float32():
    """In bfloat16, logits of 64.0 and 64.2 are equal, and 1/3 of a sum of ones is not 1."""
    router = Router(2, 3, Routing(top_k=2)).bfloat16()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[64.0, 0], [64.0, 0.2], [0, 0]]))
    scores, chosen = router(torch.tensor([[[1.0, 1.0]]], dtype=torch.bfloat16))
    assert scores.dtype == torch.float32
    assert chosen.tolist() == [[[1, 0]]]
    assert scores[0, 0, 0] > 0.54
    made, x = layer(dtype=torch.bfloat16), tokens(torch.bfloat16)
    made(x).sum().backward()
    assert made(x).dtype == x.grad.dtype == made.router.weight.grad.dtype == torch.bfloat16


def test_all_tokens_may_choose_the_same_experts_and_one_token_is_enough():
    made = layer()
    with torch.no_grad():
        made.router.weight.zero_()
    for x in (tokens(), tokens(count=2)):
        torch.testing.assert_close(made(x), by_formula(made, x), atol=1e-5, rtol=1e-5)
    made(tokens()).sum().backward()
    assert made.experts.w1.grad[3:].eq(0).all()
