"""READMEs of research/ put equations beside the code: what they link to is there."""

import re
from pathlib import Path

import pytest

from torchtitan import research

READMES = sorted(Path(research.__file__).parent.glob("*/README.md"))


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.parent.name)
def test_names_are_defined_where_links_lead(page: Path) -> None:
    links = re.findall(r"\[`([\w.]+)`\]\(([\w./]+\.py)\)", page.read_text())
    assert links
    for names, target in links:
        code = (page.parent / target).read_text()
        for name in names.split("."):
            defined = rf"^ *((def|class) {name}\b|{name}(:.*)? = )"
            assert re.search(defined, code, re.MULTILINE), f"{target} has no {names}"
