"""The sources of the package and the pages of documentation, each read and parsed once."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torchtitan"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(PACKAGE.glob("research/*/README.md")),
]


@cache
def text(path):
    return path.read_text(encoding="utf-8")


@cache
def tree(path):
    return ast.parse(text(path))


@cache
def nodes(path):
    """All nodes of a module, in the order of `ast.walk`."""
    return tuple(ast.walk(tree(path)))


def place(path):
    """The path of a module in the package."""
    return path.relative_to(PACKAGE).as_posix()
