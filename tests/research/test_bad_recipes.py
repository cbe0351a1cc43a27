"""Bad recipes of systems, and lists of names that have all of them."""

from pathlib import Path

import pytest

from tests.recipes.test_bad_recipes import HELP, Case, cases, is_refused
from torchtitan.config import listed
from torchtitan.optim import OPTIMIZERS

TABLE = Path(__file__).with_name("bad_recipes.txt")
RANGER21 = listed(OPTIMIZERS["Ranger21"].model_fields, f"{HELP} optimizer")


@pytest.mark.parametrize("case", cases(TABLE), ids=lambda case: case.name)
def test_mistake(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.replace("{RANGER21}", RANGER21) for line in case.lines]
    is_refused(case._replace(lines=lines), tmp_path, monkeypatch)


def test_table_is_read_whole() -> None:
    found = cases(TABLE)
    assert len(found) >= 20
    assert len({case.name for case in found}) == len(found)
    assert all(case.lines for case in found)
