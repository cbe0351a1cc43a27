"""Draws docs/images/architecture.svg from the imports: python scripts/draw_architecture.py [to].

A package is as high as its longest chain of imports. An import that follows from others is not
drawn: if A imports B and B imports C, there is no line from A to C.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from svg import LINE, Picture

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchtitan"
WIDTH, ROW, HEIGHT = 1000, 52, 28
FILLS = {"tools": "#fde3c8", "launch": "#fde3c8", "train": "#fde3c8"}
FILLS |= dict.fromkeys(("plan", "cluster", "research"), "#e7d9f2")
GROUND, SERVICE, RUN = "#eff2f5", "#cfdffd", "#cfecd7"


def find_imports() -> dict[str, set[str]]:
    """Return the packages and modules at the top of torchtitan, with those that each imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if not own.startswith("__"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                found[own] |= imported(node)
    return {name: (others & found.keys()) - {name} for name, others in found.items()}


def imported(node: ast.AST) -> set[str]:
    """Return the parts of torchtitan that a statement imports."""
    names = set()
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        names = {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("torchtitan.")}


def wide(name: str) -> float:
    """Return the width of a box."""
    return 16 + 8.6 * len(name)


def draw(imports: Mapping[str, set[str]]) -> Picture:
    """Return the picture of packages in rows, each above all that it imports."""

    @cache
    def level(name: str) -> int:
        return 1 + max((level(other) for other in imports[name]), default=-1)

    @cache
    def below(name: str) -> frozenset[str]:
        return frozenset(imports[name]).union(*(below(other) for other in imports[name]))

    rows: dict[int, list[str]] = defaultdict(list)
    for name in sorted(imports):
        rows[level(name)].append(name)
    lines = {
        name: [other for other in others if not any(other in below(each) for each in others)]
        for name, others in imports.items()
    }
    users = {name: [user for user in lines if name in lines[user]] for name in imports}
    place: dict[str, float] = {}
    for number in sorted(rows, reverse=True):  # each under the middle of those that import it

        def middle(name: str) -> float:
            above = [place[user] for user in users[name]]
            return sum(above) / len(above) if above else WIDTH / 2

        rows[number].sort(key=middle)
        gap, x = (WIDTH - sum(map(wide, rows[number]))) / len(rows[number]), 0.0
        for name in rows[number]:
            place[name] = x + (gap + wide(name)) / 2
            x += gap + wide(name)
    top = {name: 20 + ROW * (max(rows) - level(name)) for name in imports}
    about = f"{len(imports)} packages and modules in {len(rows)} rows; imports point down."
    picture = Picture("Imports of torchtitan", about, WIDTH, ROW * len(rows) + 20)
    for name, others in sorted(lines.items()):
        for other in sorted(others):
            x, y, to_x, to_y = place[name], top[name] + HEIGHT, place[other], top[other]
            picture.line([(x, y), (to_x, to_y)], LINE)
    for name in sorted(imports):
        kind = (
            GROUND if level(name) == 0 else SERVICE if level(name) <= level("resilience") else RUN
        )
        left, fill = place[name] - wide(name) / 2, FILLS.get(name, kind)
        picture.rect(left, top[name], wide(name), HEIGHT, fill, LINE)
        picture.text(place[name], top[name] + 19, name, "middle", size=15)
    return picture


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images"
    (folder / "architecture.svg").write_text(str(draw(find_imports())), encoding="utf-8")
