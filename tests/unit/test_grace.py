"""The message about the save that follows a request to stop."""

import logging

import pytest

from torchtitan.config import ConfigError
from torchtitan.resilience.stop import outlook, planned_seconds, read_grace


@pytest.mark.parametrize(
    ("took", "saved", "grace", "level", "told"),
    [
        (95.24, 400, None, logging.INFO, "the last save took 95.2 s; the newest is of step 400"),
        (95.24, 400, 120.0, logging.INFO, "the last save took 95.2 s; the newest is of step 400"),
        (None, None, 30.0, logging.INFO, "a save is expected to take 12 s; none is finished yet"),
        (
            None,
            400,
            None,
            logging.INFO,
            "a save is expected to take 12 s; the newest is of step 400",
        ),
        (
            *(95.24, 400, 60.0, logging.WARNING),
            "the last save took 95.2 s, but the run may be killed after 60 s "
            "(TORCHTITAN_GRACE_SECONDS); if it is, it resumes from step 400, the newest save",
        ),
        (
            *(None, None, 10.0, logging.WARNING),
            "a save is expected to take 12 s, but the run may be killed after 10 s "
            "(TORCHTITAN_GRACE_SECONDS); if it is, it starts over",
        ),
    ],
)
def test_a_save_is_compared_with_the_grace_period(took, saved, grace, level, told):
    planned = planned_seconds(8_000_000_000, nodes=8)
    assert outlook(took, planned, saved, grace) == (level, told)


def test_the_grace_period_is_read():
    assert read_grace({}) is None
    assert read_grace({"TORCHTITAN_GRACE_SECONDS": ""}) is None
    assert read_grace({"TORCHTITAN_GRACE_SECONDS": "90"}) == 90.0
    for word in ("soon", "0", "-3", "inf", "nan"):
        with pytest.raises(ConfigError) as error:
            read_grace({"TORCHTITAN_GRACE_SECONDS": word})
        told = f"TORCHTITAN_GRACE_SECONDS: got {word}; wanted a number of seconds > 0"
        assert str(error.value) == told
