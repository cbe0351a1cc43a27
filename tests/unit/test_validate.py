"""Metrics over several held-out data sets."""

import pytest

from tests import tiny
from torchtitan.models.settings import TextConfig
from torchtitan.tasks.next_token import NextToken
from torchtitan.validate import Sums, ValidationConfig, Validator


def test_the_loss_over_data_sets_is_that_of_all_targets(monkeypatch):
    """Not the mean of their means: one has 10 targets, the other 30."""
    sums = {"few": Sums(30.0, 10, (40,)), "many": Sums(10.0, 30, (20,))}
    nothing = None
    validator = Validator(
        ValidationConfig(),
        dict.fromkeys(sums, nothing),
        accumulation=1,
        task=NextToken(TextConfig(), tiny.ARGS),
        model=nothing,
        world=nothing,
    )
    monkeypatch.setattr(validator, "_measure", sums.__getitem__)
    found = {key: value for key, value in validator.run().items() if "_loss" in key}
    assert found == {
        "validation_loss": 1.0,
        "validation_loss/few": 3.0,
        "validation_loss/many": pytest.approx(1 / 3),
    }
