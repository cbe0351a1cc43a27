"""The parts of a step, each alone: what ranks agree on, what is skipped, and what is counted."""

import math
from types import SimpleNamespace

import pytest
import torch

from torchtitan.checkpoint import TrainState
from torchtitan.checkpoint.folder import read_state
from torchtitan.checkpoint.storage import write_manifest_of
from torchtitan.device import Device
from torchtitan.optim import GradientNorm
from torchtitan.parallel.parallel_model import ParallelModel
from torchtitan.resilience.spikes import Guard, SpikesConfig
from torchtitan.step import Agreement, StepOptimizers, StepStatus, StepVote
from torchtitan.timeline import Timeline

TWO = torch.tensor(2.0)


@pytest.fixture
def timeline():
    return Timeline(Device("cpu"))


def status(loss=5.0, norm=1.0, **fields):
    known = {"own_norm": torch.tensor(norm), **fields}
    return StepStatus({"loss": torch.tensor(loss)}, torch.tensor(norm), loss, norm, 64, **known)


class TwoRanks:
    """A world of which this is rank 1 of two, and the other rank has these values."""

    rank, size = 1, 2

    def __init__(self, *others, highest=0.0):
        self.others, self.highest = torch.tensor(others), torch.tensor(highest)
        self.sums = 0

    def terms(self, values):
        return values

    def sum(self, values, over):
        assert over == "all"
        self.sums += 1
        return values + self.others

    def max(self, values):
        return torch.maximum(values, self.highest)


def agreement(timeline, world, *votes, norm=0.5, is_split=True, **options):
    agree = Agreement(world, timeline, **options)
    agree.votes = votes
    own = GradientNorm(torch.tensor([norm**2]), is_split)
    return agree({"loss/z": TWO / 2, "loss": TWO}, own, torch.tensor(2**24 + 1))


def test_one_sum_tells_all_ranks_of_a_step(timeline):
    world = TwoRanks(1.0, 1.44, 0.25)
    agreed = agreement(timeline, world)
    assert (agreed.highest_loss, agreed.count, world.sums) == (3.0, 2**24 + 1, 1)
    assert agreed.losses == {"loss": 3.0, "loss/z": 1.25}
    assert agreed.highest_norm == agreed.grad_norm == agreed.own_norm == pytest.approx(1.3)
    assert not agreed.is_skipped
    assert not agreed.is_void
    assert set(timeline.take()) == {"other", "sync"}


@pytest.mark.parametrize(("norm", "highest"), [(1.2, 1.2), (0.5, 1.2), (12.0, 12.0)])
def test_a_norm_that_is_complete_is_that_of_the_first_rank_or_a_higher_one(timeline, norm, highest):
    agreed = agreement(timeline, TwoRanks(1.0, 1.44, 0.25, 1.44), norm=norm, is_split=False)
    assert agreed.own_norm == pytest.approx(1.2)
    assert agreed.highest_norm == pytest.approx(highest)


def test_replicas_that_run_apart_learn_the_highest_norm_and_keep_their_own(timeline):
    world = TwoRanks(1.0, 0.0, 0.25, highest=1.5)
    agreed = agreement(timeline, world, is_split=False, norms_differ=True)
    assert (agreed.highest_norm, agreed.grad_norm, agreed.own_norm) == (1.5, 1.5, 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_split", [True, False])
def test_what_is_not_finite_on_one_rank_is_infinite_on_all(timeline, is_split, bad):
    world = TwoRanks(bad, 0.25, 0.0, *[0.25] * (not is_split))
    agreed = agreement(timeline, world, norm=bad, is_split=is_split)
    assert (agreed.highest_loss, agreed.highest_norm) == (math.inf, math.inf)


def test_votes_are_added_up_on_every_rank(timeline):
    heard = {}
    mine = {"stop": True, "signal": False, "late": 2.5}
    votes = [
        StepVote(lambda value=value: value, lambda agreed, name=name: heard.update({name: agreed}))
        for name, value in mine.items()
    ]
    agreement(timeline, TwoRanks(3.0, 0.25, 0.0, 0.0, 1.0, 1.5), *votes)
    assert heard == {"stop": 1.0, "signal": 1.0, "late": 4.0}


@pytest.mark.parametrize(
    ("loss", "norm", "why"),
    [
        (math.inf, 1.0, "the loss is not finite"),
        (5.0, math.inf, "the gradient norm is not finite"),
        (90.0, 1.0, "the loss is more than 2 standard deviations"),
    ],
)
def test_guard_skips_a_spike_and_says_why(caplog, loss, norm, why):
    history = {"loss": [5.0, 6.0], "grad_norm": [1.0, 1.1]}
    state = TrainState(step=8, history=history)
    guard = Guard(SpikesConfig(sigma=2, window=2), state, "made already")
    spiky = status(loss, norm)
    assert not guard.accepts(spiky)
    assert spiky.is_skipped
    assert spiky.notes["skipped_because"] == ("loss" if norm == 1.0 else "grad_norm")
    (line,) = caplog.messages
    assert line.startswith(f"step 9: loss {loss:g}, gradient norm {norm:g}: {why}")
    assert line.endswith("; the update is made already")
    assert state.history == {"loss": [5.0, 6.0], "grad_norm": [1.0, 1.1]}
    state.advance(spiky)
    assert (state.step, state.skipped, state.consecutive_skips) == (9, 1, 1)


def test_guard_accepts_what_is_usual_and_remembers_it(caplog):
    state = TrainState()
    good = status()
    assert Guard(SpikesConfig(), state).accepts(good)
    assert (good.is_skipped, good.notes, caplog.messages) == (False, {}, [])
    assert state.history == {"loss": [5.0], "grad_norm": [1.0]}


def test_counters_move_once_a_step_is_over():
    state = TrainState(step=3, tokens=100, history={"loss": [5.0]})
    state.advance(status(is_void=True, is_skipped=True))
    assert state == TrainState(step=3, tokens=100, history={"loss": [5.0]})
    for is_skipped, in_a_row in ((True, 1), (True, 2), (False, 0), (True, 1)):
        state.advance(status(is_skipped=is_skipped))
        assert state.consecutive_skips == in_a_row
    assert (state.step, state.tokens, state.skipped) == (7, 100 + 4 * 64, 3)


@pytest.mark.parametrize("in_backward", [True, False])
def test_weights_change_only_when_they_may(timeline, in_backward):
    done = []
    inner = SimpleNamespace(
        in_backward=in_backward,
        begin=lambda factor: done.append("begin") or 1e-3 * factor,
        norm=lambda: GradientNorm(torch.tensor([0.64]), is_split=False),
        clip=lambda max_norm, norm: done.append(f"clip {norm:g} to {max_norm}"),
        step=lambda: done.append("step"),
    )
    optimizers = StepOptimizers(inner, 0.3, timeline)
    optimizers.before_update = [lambda: done.append("wait")]
    optimizers.after_update = [lambda: done.append("updated")]
    assert optimizers.begin(0.5) == 5e-4
    norm = optimizers.norm().complete()
    assert norm == pytest.approx(0.8)
    optimizers.step(norm, 0.8)
    optimizers.step(norm, 0.2)  # well below the limit
    optimizers.step(norm, 0.31)
    # Where the backward updates the weights, they have to be writable before it.
    clipped = ["wait", "clip 0.8 to 0.3", "step", "updated"]
    updates = [*clipped, "wait", "step", "updated", *clipped]
    assert done == [*["wait"] * in_backward, "begin", *updates]
    assert set(timeline.take()) == {"other", "clip", "optimizer"}


def test_features_are_called_around_the_passes_in_order(timeline):
    done = []

    class OneRank(ParallelModel):
        def accumulate(self, batches, count):
            done.append(batches)
            return {"loss": TWO, "loss/z": TWO / 2}

    nothing = None
    model = OneRank([], nothing, SimpleNamespace(end_step=bool), nothing, nothing, timeline)
    model.before_forward = [lambda: done.append("first"), lambda: done.append("second")]
    model.after_backward = [lambda batches, losses: done.append((batches, losses["loss"].item()))]
    batches = ["batch"]
    assert model.forward_backward(batches, TWO) == {"loss": 2.0, "loss/z": 1.0}
    assert done == ["first", "second", ["batch"], (["batch"], 2.0)]


def saved(folder, **counters):
    """A checkpoint without tensors."""
    what = {"step": 4, "model_only": False, "ranks": 1, "layout": {}}
    return write_manifest_of(folder, {}, {"train_state": counters, "data": {}}, [], {}, **what)


def test_counters_of_old_checkpoints_are_read(tmp_path):
    old = {"step": 4, "skipped": 3, "skipped_in_a_row": 2, "stepped_over": 32}
    state = read_state(tmp_path, saved(tmp_path, **old))
    assert TrainState(**state["train_state"]) == TrainState(
        step=4, skipped=3, consecutive_skips=2, skipped_samples=32
    )
    assert state["data"] == {}


def test_counters_are_read_as_they_were_saved(tmp_path):
    new = {"step": 4, "consecutive_skips": 1, "skipped_samples": 8, "rollbacks": 1}
    assert read_state(tmp_path, saved(tmp_path, **new))["train_state"] == new
