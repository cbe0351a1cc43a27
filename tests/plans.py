"""Commands without the plan of a recipe, which takes seconds, for tests that are not about it."""

import pytest

from torchtitan.config import RecipeError

PLANNERS = ("torchtitan.plan.comparison.plan_on",)


def leave_out(patch):
    """Let every command that reports a plan say that there is none."""

    def refuse(*_, **__):
        raise RecipeError(["planning is left out in this test"])

    for planner in PLANNERS:
        patch.setattr(planner, refuse)


@pytest.fixture
def no_plan(monkeypatch):
    leave_out(monkeypatch)
