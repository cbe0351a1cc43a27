"""Auxiliary losses: their weights by step, their sums by hand, and what is refused."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import layouts, tiny
from tests.layouts import ALL_LOSSES, BESIDE, FULL, NO_SEQUENCE, OPERATORS, case
from tests.ranks import run_ranks
from tests.runs import compare, rows, trace, train
from tests.tiers import tiers
from torchtitan.losses import MultiToken, ZLoss, squared_normalizer
from torchtitan.models import MODELS
from torchtitan.models.decoder import Decoder, TransformerBlock
from torchtitan.models.output import AuxiliaryLoss
from torchtitan.parallel.loss import AuxiliaryLosses
from torchtitan.tasks.next_token import TokenBatch, look_ahead
from torchtitan.tools.check import summary

CHUNKED = ALONE = case(batch=8, chunk=301)
SPLIT, PIPELINE = case(shard=2, chunk=100), case(2, tp=2, chunk=64)


def recipe(*losses, layout=CHUNKED, folder="unused", **keys):
    job = layouts.job(layout, "SGD", job={"dump_folder": str(folder)}, **keys)
    return job.model_copy(update={"auxiliary_losses": losses})


def test_weights_by_step():
    loss = ZLoss(weight=1.0, warmup_steps=4, final_weight=0.5, final_step=10, decay_steps=2)
    assert [loss.weight_at(step) for step in (1, 2, 4, 8, 9, 10, 99)] == [
        *(0.25, 0.5, 1.0, 1.0, 0.75, 0.5, 0.5)
    ]
    assert ZLoss(weight=2.0).weight_at(1) == 2.0
    at_once = MultiToken(weight=0.3, depth=2, final_weight=0.1, final_step=3)
    assert at_once.weights(2) == {"multi_token_1": 0.15, "multi_token_2": 0.15}
    assert at_once.weights(3) == {"multi_token_1": 0.05, "multi_token_2": 0.05}


def test_what_follows_each_token():
    """By hand: four tokens, of which the last two are another document."""
    batch = TokenBatch(
        tokens=torch.tensor([[5, 6, 7, 8]]),
        targets=torch.tensor([[6, 7, 8, -100]]),
        positions=torch.arange(4)[None],
    )
    found = look_ahead(batch, 2)
    assert found.ahead_tokens.tolist() == [[[6, 7], [7, 8], [8, 0], [0, 0]]]
    assert found.ahead_targets.tolist() == [[[7, 8], [8, -100], [-100, -100], [-100, -100]]]
    two = {"targets": torch.tensor([[6, 7, 8, 9]]), "documents": torch.tensor([[0, 0, 1, 1]])}
    found = look_ahead(dataclasses.replace(batch, **two), 1)
    assert found.ahead_targets.flatten().tolist() == [7, -100, 9, -100]


def test_sums_by_hand():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 2], [3, 4, -100]])
    squares = logits.exp().sum(-1).log()[targets != -100] ** 2
    torch.testing.assert_close(squared_normalizer(logits, targets), squares.sum())


class Squared(nn.Module):
    """Doubles its input, with the sum of its squares as an auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.squared = AuxiliaryLoss("squared", 0.5)

    def forward(self, x):
        return self.squared(2 * x, x.square().sum())


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_loss_of_a_block_counts_once(is_recomputed):
    """In what is reported and in the gradient, also of a block that is computed again."""
    block, auxiliary = Squared(), AuxiliaryLosses(["squared"])
    auxiliary.attach([block], [], None)
    total = torch.zeros(())
    inputs = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)]
    with auxiliary.recording(torch.tensor(4)) as found:
        for x in inputs:
            y = checkpoint(block, x, use_reentrant=False) if is_recomputed else block(x)
            total = total + y.sum()
        total.backward()
    assert {name: share.item() for name, share in found.items()} == {
        "loss": 0.5 * (1 + 4 + 9) / 4,
        "loss/squared": (1 + 4 + 9) / 4,
    }
    for x in inputs:
        torch.testing.assert_close(x.grad, 2 + 0.5 * 2 * x.detach() / 4)


def test_what_is_trained_on_is_their_sum(tmp_path):
    names = {"z_loss", "multi_token_1", "multi_token_2"}
    their_sum_is_trained_on(ALL_LOSSES, names, tmp_path)


def their_sum_is_trained_on(losses, names, tmp_path):
    """All are in the metrics, and `loss` is the main one plus each times its weight."""
    main, both = tmp_path / "main", tmp_path / "both"
    train_here(recipe(folder=main, training={"steps": 4}))
    job = recipe(*losses, folder=both, training={"steps": 4})
    (now,) = run_ranks(train, 1, job, lambda run: run.model.auxiliary.weights)
    assert now == {name: w for loss in losses for name, w in loss.weights(4).items()}
    (first, *_), (added, *_, last) = steps(main), steps(both)
    weights = [loss.weights(1) for loss in losses]
    named = {name: weight for each in weights for name, weight in each.items()}
    assert named.keys() == names
    total = sum(weight * added[f"loss/{name}"] for name, weight in named.items())
    assert added["loss"] == pytest.approx(first["loss"] + total, rel=1e-6)
    assert last["loss/multi_token_1"] < added["loss/multi_token_1"]


def train_here(job):
    run_ranks(train, 1, job)


def steps(folder):
    return [row for row in rows(folder) if "loss" in row]


def test_without_weight_the_run_is_the_same_to_the_bit():
    without_weight_the_run_is_the_same(ALL_LOSSES)


def without_weight_the_run_is_the_same(losses):
    none = [loss.model_copy(update={"weight": 0.0, "final_weight": None}) for loss in losses]
    off = [loss.model_copy(update={"final_step": 0}) for loss in none]
    (plain,), (found,) = (run_ranks(trace, 1, recipe(*losses)) for losses in ((), off))
    assert plain.losses == found.losses
    assert plain.weights[-1].keys() == found.weights[-1].keys()
    for name, weight in plain.weights[-1].items():
        assert torch.equal(weight.local, found.weights[-1][name].local)


def test_what_a_pipeline_hands_on_is_told():
    jobs = {pp: recipe(MultiToken(depth=2), layout=case(pp)) for pp in (1, 2)}
    said = {pp: [*summary(job, pp, "not planned")] for pp, job in jobs.items()}
    line = "each stage hands on 3 times as much in training: later tokens too"
    assert line in said[2]
    assert line not in said[1]


def test_a_loss_without_weight_that_is_left_out_is_told():
    notes = tiny.problems(recipe(MultiToken(weight=0), ZLoss(weight=0)), severity="note")
    assert [note.path for note in notes] == ["auxiliary_losses.0.weight"]


@pytest.mark.gate
def test_a_run_resumes_on_another_layout(tmp_path):
    resumes_on_another_layout(ALL_LOSSES, tmp_path)


def resumes_on_another_layout(losses, tmp_path):
    """Weights of auxiliary losses by step, and what they train."""
    saves = {"checkpoint": {"enable": True, "interval": 2}, "lr_scheduler": {"total_steps": 4}}
    saves["validation"] = {"enable": True, "freq": 2, "steps": 1}
    for folder, parts in {"whole": [(ALONE, 4)], "halves": [(SPLIT, 2), (PIPELINE, 4)]}.items():
        for layout, last in parts:
            job = recipe(
                *losses,
                layout=layout,
                folder=tmp_path / folder,
                training={"steps": last},
                model={"flavor": "deep"},
                **saves,
            )
            run_ranks(train, layout.ranks, job)
    whole, halves = (steps(tmp_path / folder) for folder in ("whole", "halves"))
    assert [row["step"] for row in halves] == [row["step"] for row in whole] == [1, 2, 3, 4]
    for expected, found in zip(whole, halves, strict=True):
        for name in ("loss", *(name for name in expected if name.startswith("loss/"))):
            assert found[name] == pytest.approx(expected[name], rel=1e-5)
    both = (rows(tmp_path / folder) for folder in ("whole", "halves"))
    held_out = [[r["validation_loss"] for r in each if "validation_loss" in r] for each in both]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)
    assert len(held_out[0]) == 2


def compiled_parts(run):
    (part,) = run.model.parts
    modules = part.named_modules()
    return [n for n, m in modules if hasattr(m.forward, "_torchdynamo_orig_callable")]


@pytest.mark.gate
def test_blocks_of_later_tokens_are_compiled_like_the_others(tmp_path):
    compiled = {"enable": True, "backend": "eager"}
    job = recipe(*ALL_LOSSES, folder=tmp_path, training={"steps": 1}, compile=compiled)
    (found,) = run_ranks(train, 1, job, compiled_parts)
    assert found == [*("layers.0", "layers.1"), "auxiliary.1.block", "auxiliary.2.block"]


@pytest.mark.gate
@pytest.mark.parametrize(
    ("losses", "layout"), [(BESIDE, case(batch=8)), (ALL_LOSSES, CHUNKED)], ids=["beside", "all"]
)
def test_compiled_blocks_train_the_same(losses, layout):
    compiled_blocks_train_the_same(losses, layout)


def compiled_blocks_train_the_same(losses, layout):
    compiled = {"enable": True, "backend": "aot_eager"}
    (eager,) = run_ranks(trace, 1, recipe(*losses, layout=layout))
    (found,) = run_ranks(trace, 1, recipe(*losses, layout=layout, compile=compiled))
    assert found.losses == pytest.approx(eager.losses, rel=1e-5)


class Active(TransformerBlock):
    """A block with a loss of its own."""

    def __init__(self, args, rope):
        super().__init__(args, rope)
        self.activity = AuxiliaryLoss("activity", 0.1)

    def forward(self, *inputs):
        x = super().forward(*inputs)
        return self.activity(x, x.float().square().mean(-1).sum())


build_active = partial(Decoder, block=Active)


COMPILED = {"compile": {"enable": True, "backend": "aot_eager"}}
IN_ONE = {"compile": {"enable": True, "granularity": "model"}}
BY_BLOCK = {
    "TP 2": (case(tp=2), {}),
    "TP 2, no sequence parallelism": (case(tp=2, **NO_SEQUENCE), {}),
    "FSDP 2 x TP 2 x PP 2": (case(2, shard=2, tp=2), {}),
    "compiled": (case(batch=8), COMPILED),
    "compiled, full recomputation": (case(batch=8, recompute=FULL), COMPILED),
    "TP 2, compiled, operators recomputed": (case(tp=2, recompute=OPERATORS), COMPILED),
}


@pytest.mark.parametrize("name", tiers(BY_BLOCK, ("TP 2",)))
def test_losses_of_blocks(name, monkeypatch):
    losses_of_blocks_are_those_of_one_rank(*BY_BLOCK[name], monkeypatch)


def losses_of_blocks_are_those_of_one_rank(layout, keys, monkeypatch):
    active = dataclasses.replace(MODELS["tiny"], name="active", build=build_active)
    monkeypatch.setitem(MODELS, "active", active)
    model = {"name": "active", "flavor": "deep" if layout.pp > 1 else "flat"}
    (expected,) = run_ranks(trace, 1, recipe(layout=case(batch=8), model=model))
    job = recipe(layout=layout, model=model, **keys)
    assert not tiny.problems(job, ranks=layout.ranks)
    for rank, found in enumerate(run_ranks(trace, layout.ranks, job)):
        compare(found, expected, f"rank {rank}")
