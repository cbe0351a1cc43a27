"""Balance of experts: the losses by their formulas, and the counts of a step and what follows."""

import math
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.layouts import FULL
from tests.ranks import run_ranks
from torchtitan.device import Device
from torchtitan.expert_loads import ExpertLoads
from torchtitan.losses import LoadBalance, MultiToken, RouterZLoss
from torchtitan.models.experts import Router, Routing
from torchtitan.resilience.spikes import Guard
from torchtitan.tools.verify.measure import training

BALANCED = {
    "model": {"name": "tiny_sparse", "flavor": "flat", "router_bias": True},
    "experts": {"bias_update_rate": 0.25},
}
LOSSES = (LoadBalance(), RouterZLoss())
AXES = {"context": "context_parallel_degree", "tensor": "tensor_parallel_degree"}


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_losses_of_a_router_are_their_formulas(scores):
    torch.manual_seed(0)
    routing = Routing(top_k=2, scores=scores, balances=True, has_z_loss=True, layers=4)
    router, x, found = Router(6, 5, routing), torch.randn(2, 7, 6), dict[str, Tensor]()

    def keep(loss, given, total):
        found[loss.name] = total
        return given

    with torch.no_grad():
        router.weight.normal_()
    router.share.copy_(torch.tensor([0.5, 0.2, 0.1, 0.2, 0.0]))
    router.balance.core = router.z_loss.core = keep
    router(x)
    balance = z_loss = 0.0
    for token in x.flatten(0, 1):
        logits = router.weight @ token
        probabilities = logits.softmax(0) if scores == "softmax" else logits.sigmoid()
        probabilities = probabilities / probabilities.sum()
        balance += 5 * sum(f * p for f, p in zip(router.share, probabilities, strict=True)) / 4
        z_loss += logits.exp().sum().log() ** 2 / 4
    torch.testing.assert_close(found, {"load_balance": balance, "router_z_loss": z_loss})
    both = sum(found.values()), balance + z_loss
    torch.testing.assert_close(*(torch.autograd.grad(each, router.weight) for each in both))


class Seen(NamedTuple):
    """A run of one rank."""

    rows: list[dict[str, Any]]
    biases: Tensor
    """(steps, layers, E), after each step."""
    loads: Tensor
    """(steps, layers, E), those that the bias moved by."""


def run(job, *, uneven=False):
    rows, biases, loads = [], [], []
    update = ExpertLoads.update

    def keep(mine):
        loads.append(mine.loads)
        update(mine)

    with mock.patch.object(ExpertLoads, "update", keep):
        for made, row in training(job, Device("cpu"), uneven=uneven):
            (part,) = made.model.parts
            every = [m.bias.clone() for m in part.modules() if isinstance(m, Router)]
            rows.append(row)
            made.after_step()  # validation, among others
            biases.append(torch.stack(every))
    return Seen(rows, torch.stack(biases), torch.stack(loads) if loads else torch.empty(0))


def recipe(**sections):
    merged = tiny.merged(BALANCED, sections)
    return tiny.job(**merged).model_copy(update={"auxiliary_losses": LOSSES})


def alone(**sections):
    (found,) = run_ranks(run, 1, recipe(**sections))
    return found


def all_of(jobs, *, uneven=False):
    return {name: run(job, uneven=uneven) for name, job in jobs.items()}


def test_the_bias_moves_against_the_load_of_the_training_forward_alone():
    """Each choice of the global batch counts once, and each bias moves against its load."""
    jobs = {
        "plain": recipe(),
        "recomputed": recipe(activation_checkpoint=FULL),
        "accumulated": recipe(training={"global_batch_size": 8, "local_batch_size": 2}),
        "validated": recipe(validation={"enable": True, "freq": 1, "steps": 1}),
    }
    (found,) = run_ranks(all_of, 1, jobs)
    one, choices = found["plain"], 2 * 8 * jobs["plain"].training.seq_len
    for name, each in found.items():
        assert (each.loads.sum(-1) == choices).all(), f"{name}: some choices do not count once"
        assert torch.equal(each.biases, one.biases), f"{name}: a bias moved otherwise"
    steps = one.biases.diff(dim=0, prepend=torch.zeros_like(one.biases[:1]))
    missing = one.loads.sum(-1, keepdim=True) - one.loads * one.loads.shape[-1]
    assert torch.equal(steps, 0.25 * missing.sign()), "a bias does not move against its load"


def on_each_axis():
    alone, once = {"data_parallel_shard_degree": 1}, {"steps": 1}
    return {n: recipe(parallelism={d: 2, **alone}, training=once) for n, d in AXES.items()}


def test_all_ranks_move_the_bias_by_the_whole_load():
    """Also where ranks have parts of sequences: of context, and of the stream of tensor ranks."""
    jobs = on_each_axis()
    ranks = run_ranks(all_of, 2, jobs)
    for name, job in jobs.items():
        for each in ranks:
            assert (each[name].loads.sum(-1) == 2 * 8 * job.training.seq_len).all(), name
            assert torch.equal(each[name].biases, ranks[0][name].biases), name


def test_tokens_without_a_target_do_not_count():
    """Such as padding. Uniform shares make the balance 1, if the divisor is what is counted."""
    jobs = on_each_axis()
    ranks = run_ranks(partial(all_of, uneven=True), 2, jobs)
    expected = ranks[0]["context"].loads
    assert 0 < expected.sum(-1).max() < 8 * 2 * jobs["context"].training.seq_len
    for name in jobs:
        for each in ranks:
            assert each[name].rows[0]["loss/load_balance"] == pytest.approx(1.0)
            assert torch.equal(each[name].loads, expected), name


def test_metrics_are_of_the_loads():
    job = recipe(loss={"vocabulary_chunk": 100})
    losses = {"auxiliary_losses": (*LOSSES, MultiToken(depth=2))}
    ((rows, _, loads),) = run_ranks(run, 1, job.model_copy(update=losses))
    assert rows[0]["loss/load_balance"] == pytest.approx(1.0)  # shares begin uniform
    for row, of_step in zip(rows, loads, strict=True):
        shares = of_step / of_step.sum(-1, keepdim=True)
        entropy = torch.distributions.Categorical(shares).entropy().mean() / math.log(6)
        assert row["experts/busiest_share"] == pytest.approx(shares.max().item())
        assert row["experts/entropy"] == pytest.approx(entropy.item(), rel=1e-5)


def test_a_rate_of_zero_keeps_the_bias():
    assert not alone(experts={"bias_update_rate": 0.0}).biases.any()


def test_a_skipped_step_keeps_the_bias(monkeypatch):
    def skip(guard, status):
        status.is_skipped = True
        return False

    monkeypatch.setattr(Guard, "accepts", skip)
    rows, biases, _ = alone()
    assert all(row["skipped"] for row in rows)
    assert not biases.any()
    assert rows[-1]["loss/load_balance"] == pytest.approx(1.0)  # the shares are kept as well


def test_replica_groups_would_balance_apart():
    job = tiny.job(**BALANCED, fault_tolerance={"enable": True, "group_size": 2})
    assert "fault_tolerance.enable" in {each.path for each in tiny.problems(job)}
