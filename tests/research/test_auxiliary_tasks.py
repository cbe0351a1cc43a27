"""The next latent: its sum by hand, what is trained on, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from tests import tiny
from tests.layouts import BY_DOCUMENTS, case
from tests.ranks import run_ranks
from tests.research.layouts import BESIDE_LATENT, LATENT_LOSSES, SIMPLE
from tests.runs import compare, trace
from tests.unit import test_auxiliary
from tests.unit.test_auxiliary import CHUNKED, IN_ONE, recipe
from torchtitan.models import MODELS
from torchtitan.parallel import SHARDING
from torchtitan.research.auxiliary_tasks import HEAD, LatentPredictor, NextLatentLoss

needs_simple_fsdp = pytest.mark.skipif("simple_fsdp" not in SHARDING, reason="it is not there")


def test_sum_by_hand():
    module = LatentPredictor(4)
    seen = []
    module.loss.core = lambda loss, x, total: seen.append(total) or x
    x = torch.randn(1, 3, 4, requires_grad=True)
    module(x, torch.tensor([[[1], [2], [-100]]]))
    expected = 2 - F.cosine_similarity(module.predict(x)[:, :2], x[:, 1:], dim=-1).sum()
    torch.testing.assert_close(seen[0], expected)
    own = torch.autograd.grad(seen[0], x)[0]
    assert torch.equal(own[:, 2], torch.zeros(1, 4)), "the next state gets no gradient"


def test_what_is_trained_on_is_their_sum(tmp_path):
    names = {"z_loss", "next_latent", "multi_token_1", "multi_token_2"}
    test_auxiliary.their_sum_is_trained_on(LATENT_LOSSES, names, tmp_path)


def test_without_weight_the_run_is_the_same_to_the_bit():
    test_auxiliary.without_weight_the_run_is_the_same(LATENT_LOSSES)


def test_it_takes_a_head_and_a_target_more():
    args, loss = MODELS["tiny"].flavors["tiny"], NextLatentLoss()
    with_head = loss.over(args)
    assert (with_head.auxiliary_heads, with_head.ahead) == ((HEAD,), 1)
    assert loss.over(with_head) == with_head
    assert loss.is_in(with_head)
    assert not loss.is_in(args)
    assert not loss.is_in(MODELS["llama3"])
    assert NextLatentLoss(weight=0).over(args) == args
    flops = MODELS["tiny"].flops_per_unit
    assert flops(with_head, 32) - flops(args, 32) == 6 * args.dim**2


def test_rows_that_are_cut_differently_are_refused():
    """A rank would not know where the successor of a position is."""
    key = "parallelism.context_parallel_load_balancer"
    for layout, count in ((case(cp=2, **BY_DOCUMENTS), 1), (case(cp=2, documents=True), 0)):
        found = tiny.problems(recipe(NextLatentLoss(), layout=layout), ranks=2)
        assert [problem.path for problem in found] == [key] * count
        assert all("pieces that are the same for all rows" in one.message for one in found)


@pytest.mark.slow  # with other losses in the gate
def test_a_run_resumes_on_another_layout(tmp_path):
    test_auxiliary.resumes_on_another_layout(LATENT_LOSSES, tmp_path)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("losses", "layout"),
    [(BESIDE_LATENT, case(batch=8)), (LATENT_LOSSES, CHUNKED)],
    ids=["beside", "all"],
)
def test_compiled_blocks_train_the_same(losses, layout):
    test_auxiliary.compiled_blocks_train_the_same(losses, layout)


@needs_simple_fsdp
@pytest.mark.slow
def test_losses_of_blocks_in_one_graph(monkeypatch):
    test_auxiliary.losses_of_blocks_are_those_of_one_rank(
        case(shard=2, sharding=SIMPLE), IN_ONE, monkeypatch
    )


@needs_simple_fsdp
@pytest.mark.slow
def test_all_in_one_graph():
    losses = [loss.model_copy(update={"warmup_steps": 0}) for loss in LATENT_LOSSES]
    (expected,) = run_ranks(trace, 1, recipe(*losses))
    layout = case(shard=2, chunk=100, sharding=SIMPLE)
    job = recipe(*losses, layout=layout, **IN_ONE)
    assert not tiny.problems(job, ranks=layout.ranks)
    for found in run_ranks(trace, layout.ranks, job):
        compare(found, expected, "in one graph")
