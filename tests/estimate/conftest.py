"""Recordings collect garbage first, as training does, which takes long among many objects."""

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def without_old_objects():
    """What is there before the first test stays, so that no recording looks at it."""
    gc.collect()
    gc.freeze()
