"""The page of a system: what it names is there, and equations stand next to lines that exist."""

import re
from pathlib import Path

import pytest

from torchtitan import research

FOLDER = Path(research.__file__).parent
ROOT = FOLDER.parents[1]
PAGES = sorted(FOLDER.glob("*/README.md"))


def code(name: str, page: Path) -> str:
    """A file that a page names: of its folder, or of one above."""
    places = (page.parent / name, FOLDER / name, FOLDER.parent / name)
    found = [place for place in places if place.is_file()]
    assert found, f"{page.parent.name}: {name}"
    return found[0].read_text()


def test_every_folder_has_a_page() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")} - {"common"}
    assert {page.parent.name for page in PAGES} == folders


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    assert "https://arxiv.org/abs/" in text
    recipe = f"train_configs/research/{page.parent.name}.toml"
    assert recipe in text
    assert (ROOT / recipe).is_file()
    assert re.search("Not shown|Study and results: none|What differs", text)
    assert "](../../../docs/" in text, "the page for users: what it does, when, limits, results"
    for name in re.findall(r"`(tests/\S+\.py|train_configs/\S+\.toml|benchmarks/\S+)`", text):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_equations_stand_next_to_lines_that_exist(page: Path) -> None:
    """In the last cells of a table whose head says where: files, and names in them, or links."""
    named, source, is_there = 0, "", False
    for line in page.read_text().splitlines():
        cell = re.split(r"(?<!\\)\|", line)[-2].strip() if line.startswith("| ") else ""
        is_there = cell in ("where", "code") or (is_there and line.startswith("|"))
        if not is_there:
            continue
        for word, link in re.findall(r"`([\w/]+(?:\.\w+)*)`(?:\]\((\S+)\))?", cell):
            if link or word.endswith(".py"):
                source = code(link or word, page)
            if word.endswith(".py"):
                continue
            for part in word.split("."):
                assert re.search(rf"\b{part}\b", source), f"{page.parent.name}: {word}"
            named += 1
    assert named >= 4
