"""What the trials share: how runs end that nothing happens to, and the table of what came out."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest

from tests.reliability.trials import End, play, ranks_of, recipe

Undisturbed = Callable[[str], tuple[End, float]]
Tell = Callable[..., None]
PROPERTY = "reliability"


class Row(NamedTuple):
    """A trial in the table of benchmarks/results/reliability.md."""

    trial: str
    expected: str
    outcome: str
    number: int = 1


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """How a run of a layout ends that nothing happens to, and the seconds that it takes."""

    @cache
    def run(layout: str) -> tuple[End, float]:
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        played = play(recipe(folder, layout), ranks_of(layout))
        assert played.status == 0, played.log
        return End.of(folder), played.seconds

    return run


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Tell:
    """Enter a trial into the table."""

    def enter(trial: str, expected: str, outcome: str, number: int = 1) -> None:
        # A plain tuple, which a worker of pytest-xdist can send.
        record_property(PROPERTY, tuple(Row(trial, expected, outcome, number)))

    return enter
