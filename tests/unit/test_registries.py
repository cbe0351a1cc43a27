"""A test finds the library's registries, and `tiny` in them; see tests/registries.py."""

import importlib

import pytest

from tests import registries
from tests.ranks import run_ranks
from torchtitan.comm import WEIGHTS
from torchtitan.models import MODELS


@pytest.mark.parametrize("_", range(2))
def test_what_is_imported_registers_for_one_test_and_its_ranks(_):
    assert "half" not in WEIGHTS
    importlib.import_module("tests.senders")
    assert "half" in WEIGHTS
    assert run_ranks(lambda: list(WEIGHTS), 2) == [list(WEIGHTS)] * 2


def test_without_the_names_of_tests():
    assert "tiny" in MODELS
    with registries.having(registries.SHIPPED):
        assert not any(name.startswith("tiny") for name in MODELS)
    assert "tiny" in MODELS


def test_a_name_that_stays_is_refused():
    importlib.import_module("tests.senders")
    with pytest.raises(AssertionError, match="WEIGHTS\\['half'\\]"), registries.for_one_test():
        pass
