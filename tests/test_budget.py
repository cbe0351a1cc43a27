"""Size is a feature: the limits of tests/budget.toml."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = tomllib.loads((ROOT / "tests/budget.toml").read_text())
PATTERNS = {"lines": ("*.py", str.splitlines), "words": ("*.md", str.split)}


def test_no_place_exceeds_its_budget():
    found = {}
    for unit, (pattern, parts) in PATTERNS.items():
        for name, limit in BUDGET[unit].items():
            place = ROOT / name
            files = [place] if place.is_file() else place.rglob(pattern)
            size = sum(len(parts(path.read_text())) for path in files)
            if size > limit:
                found[name] = f"{size:,} {unit}, {limit:,} allowed"
    assert found == {}, "remove as much elsewhere, or raise the limit in a commit of its own"
