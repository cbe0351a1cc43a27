"""What the trials share: how runs end that nothing happens to."""

from functools import cache

import pytest

from tests.reliability.trials import End, play, ranks_of, recipe


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """How a run of a layout ends that nothing happens to, and the seconds that it takes."""

    @cache
    def run(layout):
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        played = play(recipe(folder, layout), ranks_of(layout), status=0)
        return End.of(folder), played.seconds

    return run
