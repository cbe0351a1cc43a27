"""docs/systems.md names only what there is, and quotes figures that stand where it links to."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "systems.md"
HEAD = ("system", "here", "recipe", "test", "measured here", "not reproduced")
SYSTEMS = (
    *("FSDP", "SimpleFSDP", "TorchTitan", "GaLore", "DeMo", "FlexDeMo", "LoCo", "QSDP", "RTP"),
    *("HadaCore", "Ranger21", "Geospatial ViT-MAE", "Auxiliary tasks", "FSDP, a racing planner"),
)
OUT_OF_SCOPE = "a racing planner"


def table() -> list[dict[str, str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert tuple(head) == HEAD
    return [dict(zip(HEAD, row, strict=True)) for row in rows]


ROWS = [row for row in table() if OUT_OF_SCOPE not in row["system"]]


def test_every_system_has_a_row() -> None:
    named = {name for row in table() for name in re.findall(r"\*\*(.+?)\*\*", row["system"])}
    assert named == set(SYSTEMS)
    assert all("https://arxiv.org/abs/" in row["system"] for row in table())
    (planner,) = [row for row in table() if OUT_OF_SCOPE in row["system"]]
    assert planner["here"].startswith("out of scope: it shares only the acronym")
    assert not planner["recipe"] + planner["test"] + planner["measured here"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["system"].split("**")[1])
def test_what_it_names_exists(row: dict[str, str]) -> None:
    recipes, tests = (re.findall(r"`(.+?)`", row[column]) for column in ("recipe", "test"))
    assert all((ROOT / name).is_file() for name in (*recipes, *tests))
    assert tests or "not yet" in row["here"]
    assert all(name.startswith("train_configs/") for name in recipes)
    assert row["not reproduced"]


def test_figures_stand_where_they_link_to() -> None:
    quoted = [found for row in ROWS for found in FIGURE.findall(row["measured here"])]
    assert len(quoted) >= 8
    for words, path in quoted:
        page = (PAGE.parent / path).resolve().read_text()
        numbers = re.findall(r"\d[\d.,]*\d|\d", words)
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", page), (number, path)
        assert numbers, words


FIGURE = re.compile(r"\[([^]]+)\]\(([^)#]+\.md)(?:#[^)]*)?\)")
