"""Ranks that exchange heads compute attention as on one device."""

import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests import tiny
from tests.dense import dense_attention
from tests.parallel import test_context
from tests.ranks import run_ranks
from torchtitan.models.attention import causal_attention
from torchtitan.parallel import SHARDING, activation_checkpoint, context
from torchtitan.parallel.context import all_to_all, exchanging_heads

DEGREE = "parallelism.context_parallel_degree"
METHOD = "parallelism.context_parallel_rotate_method"


def compare_with_whole(device):
    for kv_heads, together, window in itertools.product(
        (1, 2, 4), (None, test_context.documents()), (0, 7)
    ):
        together = together if together is None or window else together.to(device)
        *qkv, grad = test_context.operands(kv_heads, torch.float32, device)
        masked = partial(dense_attention, documents=together, window=window)
        expected = test_context.differentiate(masked, *qkv, grad)
        core = exchanging_heads(causal_attention, dist.group.WORLD)
        attention = partial(core, documents=together, window=window)
        found = test_context.differentiate(
            attention, *(test_context.mine(x, "none") for x in (*qkv, grad))
        )
        for name, value in found.items():
            whole = test_context.mine(expected[name], "none")
            off = ((value - whole).abs().max() / whole.abs().max()).item()
            where = f"{kv_heads} heads, window {window}, {together is not None}: {name}"
            assert off <= (1e-6 if name == "out" else 1e-5), f"{where} off by {off}"


@pytest.mark.parametrize("device", test_context.DEVICES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_with_exchanged_heads_equals_attention(ranks, device):
    """With as many key/value heads as ranks, more, and fewer."""
    run_ranks(compare_with_whole, ranks, device, device=device)


def run_as_operator():
    """Exchanges in the forward and in all of a step: plain, recomputed, and by operator."""
    torch.library.opcheck(
        all_to_all, (torch.randn(2, 3, requires_grad=True), dist.group.WORLD.group_name)
    )
    model, counts = test_context.Tiny(), []
    context.apply(model, dist.group.WORLD, "ulysses", "none")
    expected = test_context.run_tiny(model, model, "none")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for found, value in zip(test_context.run_tiny(model, compiled, "none"), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-6)

    def recomputed(x, together, **how):
        return checkpoint(model, x, together, use_reentrant=False, **how)

    by_operator = partial(recomputed, context_fn=activation_checkpoint._save_expensive_operators)
    for forward in (model, recomputed, by_operator):
        with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
            found = test_context.run_tiny(model, forward, "none")
        counts.append(exchange.call_count)
        assert all(map(torch.equal, found, expected))
    return counts


def test_it_compiles_as_one_graph_and_recomputation_can_spare_it():
    for counts in run_ranks(run_as_operator, 2):
        assert counts == [4, 5, 4]  # no weight needs the output, which is not recomputed


def without_data():
    with FakeTensorMode():
        rows = torch.empty(2, 3).requires_grad_()
        all_to_all(rows, "no such group").sum().backward()
        assert rows.grad is not None


def test_without_data_it_needs_no_group():
    run_ranks(without_data, 1)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"context_parallel_degree": 4}, None),
        ({"context_parallel_degree": 2, "tensor_parallel_degree": 2}, None),
        (
            {"context_parallel_degree": 8},
            (DEGREE, "ranks share the 4 heads and 2 key/value heads of tiny tiny", "use 1, 2 or 4"),
        ),
        (
            {"context_parallel_degree": 4, "tensor_parallel_degree": 2},
            (DEGREE, "ranks share the 2 heads and 1 key/value heads of each tensor", "use 1 or 2"),
        ),
    ],
)
def test_ranks_need_whole_heads(sections, expected):
    job = tiny.job(parallelism={"context_parallel_rotate_method": "ulysses", **sections})
    found = [one for one in tiny.problems(job) if one.path == DEGREE]
    assert len(found) == bool(expected)
    for one in found:
        assert all(part in one.message for part in expected[1:])


def test_heads_in_the_ratio_of_three_to_two_cannot_be_shared_by_three():
    """Repeated whole, 2 key/value heads are not 3."""
    model = {"dim": 96, "n_heads": 6, "n_kv_heads": 2}
    ranks = {"context_parallel_rotate_method": "ulysses", "context_parallel_degree": 3}
    (found,) = tiny.problems(tiny.job(model=model, parallelism=ranks, training={"seq_len": 48}))
    assert (found.path, found.message[-13:]) == (DEGREE, "use 1, 2 or 6")


@pytest.mark.skipif("rotated" not in SHARDING, reason="the system is not there")
def test_rotated_weights_have_no_heads_to_exchange():
    ranks = {"context_parallel_rotate_method": "ulysses", "context_parallel_degree": 2}
    job = tiny.job(parallelism=ranks, sharding={"name": "rotated"})
    assert (
        "one shard of the heads after another"
        in {problem.path: problem.message for problem in tiny.problems(job)}[METHOD]
    )


def test_parts_are_contiguous_whatever_the_load_balancer():
    ranks = {"context_parallel_rotate_method": "ulysses", "context_parallel_degree": 2}
    plain = tiny.job(parallelism=ranks)
    assert plain.parallelism.balancing == "none"
    assert not [note for note in tiny.problems(plain, severity="note") if "balancer" in note.path]
    chosen = tiny.job(parallelism=ranks | {"context_parallel_load_balancer": "headtail"})
    assert chosen.parallelism.balancing == "none"
    notes = [note for note in tiny.problems(chosen, severity="note") if "balancer" in note.path]
    assert "no effect with parallelism.context_parallel_rotate_method" in notes[0].message
