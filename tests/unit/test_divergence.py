"""Too many skipped steps in a row: the run rolls back, or says why it cannot and ends."""

from dataclasses import dataclass, field
from unittest.mock import Mock, call

import pytest

from torchtitan.checkpoint import TrainState
from torchtitan.device import Device
from torchtitan.resilience.divergence import Divergence, TrainingDiverged
from torchtitan.resilience.spikes import SpikesConfig
from torchtitan.timeline import Timeline


@dataclass
class Checkpoints:
    """A checkpointer with one checkpoint, of step 10, or none."""

    state: TrainState
    is_there: bool = True
    asked: list[int] = field(default_factory=list)
    saved_step: int | None = None

    def roll_back(self, before):
        self.asked.append(before)
        if self.is_there:
            self.state.skipped_samples += 8 * (self.state.step - 10)
            self.state.step, self.state.tokens, self.state.consecutive_skips = 10, 640, 0
            self.state.rollbacks += 1
        return self.is_there


def divergence(state, max_rollbacks=1, is_there=True, in_backward=False):
    """With two skipped steps in a row allowed."""
    checkpoints = Checkpoints(state, is_there)
    config = SpikesConfig(max_rollbacks=max_rollbacks)
    timeline = Timeline(Device("cpu"))
    return Divergence(config, 2, state, checkpoints, Mock(), timeline, in_backward)


def after_skips(number, **fields):
    return TrainState(step=14, tokens=896, skipped=number, consecutive_skips=number, **fields)


@pytest.mark.parametrize("skips", [0, 1])
def test_a_few_skipped_steps_are_let_pass(skips):
    watch = divergence(after_skips(skips))
    assert not watch.after_step(watch.state)
    watch.raise_if_diverged()
    assert watch.state == after_skips(skips)
    assert watch.checkpoint.asked == []


def test_too_many_in_a_row_are_rolled_back(caplog):
    caplog.set_level("INFO", "torchtitan")
    watch = divergence(after_skips(2, skipped_samples=100))
    assert watch.after_step(watch.state)
    watch.raise_if_diverged()
    # Steps 13 and 14 were skipped: the checkpoint has to be older.
    assert watch.checkpoint.asked == [13]
    assert (watch.state.step, watch.state.consecutive_skips, watch.state.rollbacks) == (10, 0, 1)
    details = {"from_step": 14, "skipped_samples": 32, "rollbacks": 1}
    told = [call.rewind_to(10, 640), call.event(10, "rollback", **details)]
    assert watch.meter.mock_calls == told
    (line,) = caplog.messages
    assert line.startswith("step 14: 2 steps in a row were skipped: rolled back to step 10;")
    assert "32 samples are skipped (rollback 1 of at most 1)" in line


@pytest.mark.parametrize(
    ("max_rollbacks", "rollbacks", "is_there", "words"),
    [
        (0, 0, True, "were skipped; none of them changed a weight"),
        (1, 1, True, "were skipped, after 1 rollbacks (spikes.max_rollbacks); none"),
        (1, 0, False, "were skipped, with no checkpoint before them to roll back to; none"),
    ],
)
def test_where_rolling_back_is_no_way_out_the_run_ends(max_rollbacks, rollbacks, is_there, words):
    watch = divergence(after_skips(2, rollbacks=rollbacks), max_rollbacks, is_there)
    # Not True: what was trained is still to be saved after this step.
    assert not watch.after_step(watch.state)
    with pytest.raises(TrainingDiverged) as error:
        watch.raise_if_diverged()
    assert str(error.value).startswith("step 14: 2 steps in a row (training.max_skipped_steps)")
    assert words in str(error.value)
    assert watch.state.step == 14
    assert watch.meter.mock_calls == []


@pytest.mark.parametrize(("saved", "words"), [(None, "none"), (12, "step-12")])
def test_after_an_update_in_the_backward_nothing_is_saved(saved, words):
    watch = divergence(after_skips(1), in_backward=True)
    watch.checkpoint.saved_step = saved
    assert watch.after_step(watch.state)
    with pytest.raises(TrainingDiverged, match=f"the last checkpoint is {words}\\."):
        watch.raise_if_diverged()
    assert watch.checkpoint.asked == []


def test_the_last_checkpoint_is_that_of_a_save_that_was_still_under_way():
    watch = divergence(after_skips(1), in_backward=True)
    assert watch.after_step(watch.state)
    watch.checkpoint.saved_step = 13
    with pytest.raises(TrainingDiverged, match="the last checkpoint is step-13"):
        watch.raise_if_diverged()
