"""The mixture of experts against its formula, token by token, and products of experts."""

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks
from torchtitan.models import experts
from torchtitan.models.experts import (
    Experts,
    MixtureOfExperts,
    Router,
    Routing,
    expert_gradients,
    expert_products,
)
from torchtitan.optim.parameters import global_norm
from torchtitan.parallel import expert_parallel
from torchtitan.parallel.expert_parallel import exchange_counts
from torchtitan.torch_private.fake_ranks import fake_process_group

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
    router, own, rule = made.router, made.experts, made.router.routing
    rows = []
    for token in x.flatten(0, 1):
        logits = router.weight @ token
        all_scores = logits.softmax(0) if rule.scores == "softmax" else logits.sigmoid()
        chosen = best(rule, all_scores if router.bias is None else all_scores + router.bias)
        scores = all_scores[chosen]
        scores = rule.scale * (scores / scores.sum() if rule.renormalizes else scores)
        parts = [own.w2[e] @ (F.silu(own.w1[e] @ token) * (own.w3[e] @ token)) for e in chosen]
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


def test_gradients_in_float64_and_sizes_that_are_not_aligned():
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(expert_products, (x, weight, ends))
    found = []
    for dtype in torch.float64, torch.float32:
        given = [each.detach().to(dtype).requires_grad_() for each in (x, weight)]
        out = expert_products(*given, ends)
        gradients = torch.autograd.grad(out.square().sum(), given)
        found.append([each.double() for each in (out, *gradients)])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


class Opened(TorchDispatchMode):
    """Notes what a device computes in our operators, too, and how often the host waits for it.

    On meta tensors, which have no values, whatever else would wait for one fails.
    """

    INNER = (experts.choose_experts, expert_products, expert_gradients, exchange_counts)

    def __init__(self):
        super().__init__()
        self.names, self.outputs, self.waits = list[str](), list[torch.Tensor](), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function._schema.name
        if inner := [each for each in self.INNER if each._qualname == name]:
            with self:
                return inner[0]._init_fn(*args, **kwargs)
        if kwargs.get("device") == torch.device("cpu"):
            self.waits += 1
            return torch.zeros(args[0].shape, dtype=kwargs["dtype"])
        out = function(*args, **kwargs)
        self.names.append(name)
        self.outputs += [each for each in pytree.tree_leaves(out) if torch.is_tensor(each)]
        return out


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_waits_for_no_choice_but_that_of_other_ranks(ranks, monkeypatch):
    """Nor are there K x tokens x D numbers in float32, or a sort of all scores."""
    monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **settings: None)
    monkeypatch.setattr(expert_parallel, "rows_arriving", lambda received, rows: 30)
    how, (dim, count, hidden) = Routing(top_k=3, has_bias=True, groups=4, top_groups=2), (64, 8, 16)
    with torch.device("meta"), fake_process_group(0, ranks):
        made = MixtureOfExperts(dim, count // ranks, hidden, how)
        made.router = Router(dim, count, how)
        for parameter in made.parameters():
            parameter.data = parameter.bfloat16()
        if ranks > 1:
            group = dist.group.WORLD
            made.experts.exchange = expert_parallel._RowExchange(group, count // ranks)
        x = torch.empty(2, 8, dim, dtype=torch.bfloat16, requires_grad=True)
        with Opened() as seen:
            made(x).sum().backward()
    assert seen.waits == ranks - 1
    assert seen.names.count("aten::sort") == ranks  # of the rows, by expert
    wide = [each.shape for each in seen.outputs if each.itemsize > 2 and each.is_floating_point()]
    assert max(map(math.prod, wide)) < 3 * 16 * dim


def test_of_equal_logits_the_first_experts_are_chosen():
    router = Router(4, 8, Routing(top_k=3))
    with torch.no_grad():
        router.weight.zero_()[5] = 1.0
    scores, chosen = router(torch.tensor([[[1.0, 0, 0, 0], [0, 0, 0, 0], [-1.0, 0, 0, 0]]]))
    assert chosen.tolist() == [[[5, 0, 1], [0, 1, 2], [0, 1, 2]]]
    torch.testing.assert_close(scores.sum(-1), torch.ones(1, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_choice_is_that_of_a_stable_sort(dtype):
    values = torch.randint(-3, 4, (500, 9)) / torch.tensor(7.0)
    values[:9] = torch.tensor([-0.0, 0, 1e-40, -1e-40, 3e38, -3e38, *[torch.inf] * 2, -torch.inf])
    values = values.to(dtype)
    wanted = values.float().sort(dim=-1, descending=True, stable=True).indices[:, :5]
    assert experts.choose_experts(values, None, 5, 1, 1).equal(wanted)


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
    bias = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    experts._by_row(bias, torch.zeros(1000, dtype=torch.int32)).sum().backward()
    assert bias.grad == 1000


def test_all_tokens_may_choose_the_same_experts_and_one_token_is_enough():
    made = layer()
    with torch.no_grad():
        made.router.weight.zero_()
    for x in (tokens(), tokens(count=2)):
        torch.testing.assert_close(made(x), by_formula(made, x), atol=1e-5, rtol=1e-5)
    made(tokens()).sum().backward()
    assert made.experts.w1.grad[3:].eq(0).all()


FEW_ROWS = {
    "an expert without tokens of one rank": [[0, 0, 0, 0], [0, 0, 0, 1]],
    "a rank without rows": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "one token": [[1], [0]],
}
"""The expert of each token of two ranks, each of which has one expert."""


def each_rank_has_an_expert():
    rank, (dim, _, hidden) = dist.get_rank(), SIZES
    mine, generator = slice(rank, rank + 1), torch.Generator().manual_seed(0)
    whole, own = Experts(dim, 2, hidden), Experts(dim, 1, hidden)
    own.exchange = expert_parallel._RowExchange(dist.group.WORLD, 1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
    for one, other in zip(whole.parameters(), own.parameters(), strict=True):
        one.data.normal_(0, 0.3, generator=generator)
        other.data.copy_(one.data[mine])
    for where, choices in FEW_ROWS.items():
        chosen = torch.tensor(choices)[..., None]
        x = torch.randn(*chosen.shape[:2], dim, generator=generator)
        scores = torch.rand(chosen.shape, generator=generator)
        results = []
        for layer, part in ((whole, slice(None)), (own, mine)):
            given = x[part].clone().requires_grad_()
            out = layer(given, scores[part], chosen[part])
            of_x, *of_weights = torch.autograd.grad(out.square().sum(), [given, *layer.weights])
            results.append([out, of_x, *of_weights])
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected[mine], msg=lambda m, w=where: f"{w}: {m}")
        wholes, parts = (of_weights for _, _, *of_weights in results)
        norm = global_norm(DTensor.from_local(x, mesh, [Shard(0), Shard(0)]) for x in parts)
        torch.testing.assert_close(norm, torch.cat([x.flatten() for x in wholes]).norm())


def test_ranks_with_few_rows_compute_what_one_does():
    """And the norm of their gradients is that of all experts."""
    run_ranks(each_rank_has_an_expert, 2)
