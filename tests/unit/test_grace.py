"""The message about the save that follows a request to stop."""

import ast
import logging

import pytest

from tests.tables import table
from torchtitan.config import ConfigError
from torchtitan.resilience.stop import outlook, planned_seconds, read_grace


@pytest.mark.parametrize(("took", "saved", "grace", "level", "told"), table(__file__, "graces.txt"))
def test_a_save_is_compared_with_the_grace_period(took, saved, grace, level, told):
    took, saved, grace = map(ast.literal_eval, (took, saved, grace))
    planned = planned_seconds(8_000_000_000, nodes=8)
    assert outlook(took, planned, saved, grace) == (getattr(logging, level), told)


def test_the_grace_period_is_read():
    assert read_grace({}) is None
    assert read_grace({"TORCHTITAN_GRACE_SECONDS": ""}) is None
    assert read_grace({"TORCHTITAN_GRACE_SECONDS": "90"}) == 90.0
    for word in ("soon", "0", "-3", "inf", "nan"):
        with pytest.raises(ConfigError) as error:
            read_grace({"TORCHTITAN_GRACE_SECONDS": word})
        told = f"TORCHTITAN_GRACE_SECONDS: got {word}; wanted a number of seconds > 0"
        assert str(error.value) == told
