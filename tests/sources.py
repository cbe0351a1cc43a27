"""The sources of the package and the pages of documentation, each read and parsed once."""

import ast
import runpy
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torchtitan"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(PACKAGE.glob("research/*.md")),
]


@cache
def text(path):
    return path.read_text(encoding="utf-8")


@cache
def pages_of_settings():
    """The pages that are made when the site is built, by the paths that links to them have."""
    pages = runpy.run_path(str(ROOT / "scripts/write_config_docs.py"))["pages"]()
    return {ROOT / "docs" / name: page for name, page in pages.items()}


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
