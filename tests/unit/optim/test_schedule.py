"""The learning rate, step by step, against its rules written down another way."""

import math
from itertools import product
from types import SimpleNamespace

import pytest

from tests import tiny
from torchtitan.build import Run
from torchtitan.checkpoint import TrainState
from torchtitan.job import StagesOfTraining
from torchtitan.optim import ScheduleConfig
from torchtitan.optim.schedule import PowerLaw

SHAPES = {
    "linear": lambda left: left,
    "sqrt": lambda left: 1 - math.sqrt(1 - left),
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
}


def rates(config, steps):
    """The multiplier of each step, laid out from both ends.

    The warm-up is at most the run; a decay that would overlap it is shortened to what is left; the
    stable phase lies between. A virtual step that follows the last ends the decay.
    """
    rising = [done / config.warmup_steps for done in range(1, config.warmup_steps + 1)]
    if config.warmup_steps > steps:
        rising = [done / steps for done in range(1, steps + 1)]
    left = steps - len(rising)
    wanted = left if config.decay_ratio is None else round(steps * config.decay_ratio)
    length = min(wanted, left)
    low = config.min_lr_factor
    falling = [  # counted back from the virtual step, where nothing of the decay is left
        low + (1 - low) * SHAPES[config.decay_type](ahead / length)
        for ahead in range(length, 0, -1)
    ]
    stable = [1.0] * (left - length)
    return [*rising, *stable, *falling]


@pytest.mark.parametrize("decay_type", SHAPES)
@pytest.mark.parametrize("steps", [1, 2, 10, 37])
def test_learning_rate(steps, decay_type):
    warmups, ratios, floors = (0, 1, 3, 9, 10, 11, 200), (None, 0.0, 0.1, 0.5, 0.99, 1.0), (0, 0.1)
    for warmup, ratio, floor in product(warmups, ratios, floors):
        config = ScheduleConfig(
            warmup_steps=warmup, decay_ratio=ratio, decay_type=decay_type, min_lr_factor=floor
        )
        found = [config.factor(step, steps) for step in range(1, steps + 1)]
        assert found == pytest.approx(rates(config, steps), abs=1e-12)
        assert found[0] == (1 / min(warmup, steps) if warmup else 1)
        assert found[-1] > 0
        after = config.factor(steps + 1, steps)
        has_decay = steps > warmup and (ratio is None or round(ratio * steps) > 0)
        assert after == pytest.approx(floor if has_decay else 1, abs=1e-12)


def test_rates_by_hand():
    config = ScheduleConfig(warmup_steps=2, decay_ratio=0.5)
    by_hand = [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    found = [config.factor(step, 8) for step in range(1, 9)]
    assert found == pytest.approx(by_hand)
    # Of the 4 steps that would decay, the warm-up leaves 2.
    config = ScheduleConfig(warmup_steps=6, decay_ratio=0.5)
    found = [config.factor(step, 8) for step in (5, 6, 7, 8)]
    assert found == pytest.approx([5 / 6, 1, 1, 0.5])


def test_a_decay_starts_after_the_step_that_is_named():
    config = ScheduleConfig(warmup_steps=2, decay_from=4)
    assert [config.factor(step, 8) for step in range(1, 9)] == [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    constant = ScheduleConfig(warmup_steps=2, decay_ratio=0.0)
    assert [constant.factor(step, 4) for step in range(1, 5)] == [0.5, 1, 1, 1]
    assert ScheduleConfig(warmup_steps=2, decay_from=9).factor(8, 8) == 1


def test_a_power_law_depends_on_no_length_until_it_decays():
    config = PowerLaw(warmup_steps=4)
    for steps in (20, 1000):
        found = [config.factor(step, steps) for step in (1, 4, 16)]
        assert found == pytest.approx([0.25, 1, 0.5])
    assert PowerLaw(warmup_steps=0).factor(9, 10) == pytest.approx(1 / 3)
    ended = PowerLaw(warmup_steps=4, exponent=1, decay_from=16)
    assert [ended.factor(step, 20) for step in (16, 17, 19)] == pytest.approx(
        [1 / 4, 4 / 17, 2 / 19]
    )


@pytest.mark.parametrize("kind", [ScheduleConfig, PowerLaw])
def test_in_tokens_the_rates_of_an_unchanged_batch_are_the_same_bits(kind):
    size, steps = 96, 40
    ends = ({"decay_ratio": 0.5}, {"decay_from": 17}, {"decay_ratio": 0.0})
    for warmup, end, shape in product((0, 7), ends, SHAPES):
        config = kind(warmup_steps=warmup, decay_type=shape, **end)
        start = {"decay_from": end["decay_from"] * size} if "decay_from" in end else end
        by_token = config.model_copy(update={"warmup_steps": warmup * size, **start})
        assert [config.factor(step, steps) for step in range(1, steps + 1)] == [
            by_token.factor(step * size, steps * size, size) for step in range(1, steps + 1)
        ]


def test_in_tokens_the_rate_follows_the_tokens_whatever_the_batch():
    def job(batch, unit="tokens"):
        length = 96 if unit == "tokens" else 1
        schedule = {"unit": unit, "warmup_steps": 4 * length, "total_steps": 12 * length}
        training = {"seq_len": 32, "global_batch_size": batch, "steps": 12}
        return tiny.job(training=training, lr_scheduler=schedule)

    rates = [job(3, "steps").learning_rate_factor(step) for step in range(1, 13)]
    assert [job(3).learning_rate_factor(1, 96 * done) for done in range(12)] == rates
    # A batch of twice the size decays as often as it has tokens.
    for done in (4, 6, 10):
        assert job(6).learning_rate_factor(1, 96 * done) == rates[done]
    assert tiny.job(lr_scheduler={"unit": "tokens"}).schedule_steps() == 3 * 8 * 32
    stages = [{"from_step": 2, "global_batch_size": 16}, {"from_step": 9, "seq_len": 64}]
    schedule = {"unit": "tokens", "warmup_steps": 1024}
    staged = tiny.job(training={"stages": stages}, lr_scheduler=schedule)
    assert staged.schedule_steps() == (2 * 8 + 16) * 32
    (followed := StagesOfTraining(staged.stages(staged.degrees(1)))).move(2)
    run = SimpleNamespace(job=staged, stages=followed, state=TrainState(step=2, tokens=512))
    assert Run.schedule(run, 3) == 1.0
