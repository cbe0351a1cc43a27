"""The judgement of a step by those before it."""

import math

import pytest

from tests import tiny
from torchtitan.resilience.spikes import SpikesConfig, detect_spike, usual_of

FOUR = SpikesConfig(sigma=2, window=4)


def seen(*losses):
    return {"loss": list(losses), "grad_norm": [1.0, 1.0, 1.1, 0.9][: len(losses)]}


def test_usual_is_mean_and_standard_deviation():
    assert usual_of([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == (5.0, 2.0)


@pytest.mark.parametrize(("loss", "is_skipped"), [(1.0, False), (8.99, False), (9.01, True)])
def test_a_spike_is_more_than_sigma_deviations_above_the_mean(loss, is_skipped):
    config = SpikesConfig(sigma=2, window=8)
    history = {"loss": [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0], "grad_norm": [1.0] * 8}
    assert (detect_spike(config, history, loss=loss, grad_norm=1.0) is not None) == is_skipped


def test_why_is_told_in_words_and_in_numbers():
    skip = detect_spike(FOUR, seen(5.0, 5.0, 5.2, 4.8), loss=9.0, grad_norm=math.inf)
    assert skip.why == (
        "the loss is more than 2 standard deviations (0.1414) above its recent mean (5) and "
        "the gradient norm is not finite"
    )
    assert skip.row == {
        "skipped_because": "loss and grad_norm",
        "loss_mean": 5.0,
        "loss_std": pytest.approx(math.sqrt(0.02)),
        "grad_norm_mean": 1.0,
        "grad_norm_std": pytest.approx(math.sqrt(0.005)),
    }


def test_good_values_enter_the_window_and_the_oldest_leave_it():
    history = {}
    for step in range(1, 7):
        assert detect_spike(FOUR, history, loss=10.0 - step, grad_norm=1.0 + step % 2) is None
    assert history == {"loss": [7.0, 6.0, 5.0, 4.0], "grad_norm": [2.0, 1.0, 2.0, 1.0]}


@pytest.mark.parametrize("bad", [100.0, math.inf, math.nan])
def test_what_is_skipped_does_not_enter_the_window(bad):
    history = seen(5.0, 5.0, 5.2, 4.8)
    assert detect_spike(FOUR, history, loss=5.0, grad_norm=bad) is not None
    assert history == seen(5.0, 5.0, 5.2, 4.8)


def test_until_the_window_is_full_only_what_is_not_finite_is_skipped():
    history = seen(5.0, 5.0, 5.2)
    assert detect_spike(FOUR, history, loss=math.nan, grad_norm=1.0).row == {
        "skipped_because": "loss"
    }
    assert detect_spike(FOUR, history, loss=1e9, grad_norm=1.0) is None
    assert detect_spike(FOUR, history, loss=1e10, grad_norm=1.0) is not None


def test_without_sigma_only_what_is_not_finite_is_skipped():
    config = SpikesConfig(window=4)
    history = seen(5.0, 5.0, 5.2, 4.8)
    assert detect_spike(config, history, loss=1e30, grad_norm=1e30) is None
    assert detect_spike(config, history, loss=1.0, grad_norm=math.nan) is not None


def test_a_window_that_became_smaller_looks_at_the_newest_alone():
    history = {"loss": [50.0, 60.0, 1.0, 1.1, 0.9, 1.0], "grad_norm": [1.0] * 6}
    assert detect_spike(FOUR, history, loss=10.0, grad_norm=1.0) is not None
    assert detect_spike(FOUR, history, loss=1.0, grad_norm=1.0) is None
    assert history["loss"] == [1.1, 0.9, 1.0, 1.0]


@pytest.mark.parametrize(("steps", "is_told"), [(128, True), (129, False)])
def test_a_window_that_never_fills_is_told(steps, is_told):
    job = tiny.job(spikes={"sigma": 6}, training={"steps": steps})
    notes = tiny.problems(job, severity="note")
    messages = [note.message for note in notes if note.path == "spikes.window"]
    expected = f"it is full only after 128 good steps, and there are {steps}"
    assert [message.split(";")[0] for message in messages] == [expected] * is_told
