"""Balance of experts: the losses by their formulas, and the counts of a step and what follows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.layouts import FULL
from tests.ranks import run_ranks
from torchtitan.auxiliary_losses import LoadBalance, RouterZLoss
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.models.experts import Router, Routing
from torchtitan.resilience.spikes import Guard
from torchtitan.step import StepStatus
from torchtitan.tools.verify.measure import training

BALANCED: dict[str, Any] = {
    "model": {"name": "tiny_sparse", "flavor": "flat", "router_bias": True},
    "experts": {"bias_update_rate": 0.25},
}
LOSSES = (LoadBalance(), RouterZLoss())


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_losses_of_a_router_are_their_formulas(scores: Any) -> None:
    torch.manual_seed(0)
    routing = Routing(top_k=2, scores=scores, balances=True, has_z_loss=True, layers=4)
    router, x, found = Router(6, 5, routing), torch.randn(2, 7, 6), dict[str, Tensor]()

    def keep(loss: Any, given: Tensor, total: Tensor) -> Tensor:
        found[loss.name] = total.detach()
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
    torch.testing.assert_close(found["load_balance"], balance)
    torch.testing.assert_close(found["router_z_loss"], z_loss)


def run(job: JobConfig) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """The rows of a run, and the bias of its first router after each step."""
    rows, biases = [], []
    for made, row in training(job, Device("cpu"), uneven=False):
        (part,) = made.model.parts
        first = next(m for m in part.modules() if isinstance(m, Router))
        rows.append(row)
        biases.append(first.bias.clone())
    return rows, biases


def alone(**sections: Any) -> tuple[list[dict[str, Any]], list[Tensor]]:
    names = BALANCED.keys() | sections.keys()
    merged = {name: BALANCED.get(name, {}) | sections.get(name, {}) for name in names}
    job = tiny.job(**merged).model_copy(update={"auxiliary_losses": LOSSES})
    (found,) = run_ranks(run, 1, job)
    return found


def test_the_bias_moves_against_the_load_of_the_training_forward_alone() -> None:
    """Recomputation counts once, validation not at all, and microbatches add up."""
    rows, biases = alone()
    steps = torch.stack(biases).diff(dim=0, prepend=torch.zeros(1, len(biases[0])))
    assert set(steps.flatten().abs().tolist()) <= {0.0, 0.25}
    assert (steps > 0).any()
    assert (steps < 0).any()
    assert rows[0]["loss/load_balance"] == pytest.approx(1.0)  # shares begin uniform
    assert rows[-1]["loss/load_balance"] != pytest.approx(1.0, abs=1e-4)
    assert 1 / 8 < rows[0]["experts/busiest_share"] <= 0.5
    assert 0 < rows[0]["experts/entropy"] < 1
    others = (
        alone(activation_checkpoint=FULL),
        alone(training={"local_batch_size": 2, "global_batch_size": 8}),
        alone(validation={"enable": True, "freq": 1, "steps": 1}),
    )
    for found, moved in others:
        for mine, theirs in zip(biases, moved, strict=True):
            assert torch.equal(mine, theirs)
        assert [row["experts/entropy"] for row in found] == pytest.approx(
            [row["experts/entropy"] for row in rows]
        )


def test_a_rate_of_zero_keeps_the_bias() -> None:
    _, biases = alone(experts={"bias_update_rate": 0.0})
    assert not torch.stack(biases).any()


def test_a_skipped_step_keeps_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(guard: Guard, status: StepStatus) -> bool:
        status.is_skipped = True
        return False

    monkeypatch.setattr(Guard, "accepts", skip)
    rows, biases = alone()
    assert all(row["skipped"] for row in rows)
    assert not torch.stack(biases).any()
    assert rows[-1]["loss/load_balance"] == pytest.approx(1.0)  # the shares are kept as well


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "tiny tiny: it has no experts; leave it out"),
        (
            {"name": "tiny_sparse", "flavor": "flat"},
            "tiny_sparse flat: its routers have no bias; set model.router_bias = true, or leave it "
            "out",
        ),
    ],
)
def test_a_rate_without_a_bias_is_refused(model: dict[str, str], message: str) -> None:
    (found,) = tiny.problems(tiny.job(model=model, experts={"bias_update_rate": 0.1}))
    assert (found.path, found.message) == ("experts.bias_update_rate", message)


def test_losses_of_routers_are_refused_without_routers() -> None:
    job = tiny.job().model_copy(update={"auxiliary_losses": LOSSES})
    found = tiny.problems(job)
    assert [each.path for each in found] == [f"auxiliary_losses.{n}.name" for n in range(2)]
    assert {each.message for each in found} == {"tiny does not support this loss; remove it"}


def test_replica_groups_would_balance_apart() -> None:
    job = tiny.job(**BALANCED, fault_tolerance={"enable": True, "group_size": 2})
    assert "fault_tolerance.enable" in {each.path for each in tiny.problems(job)}
