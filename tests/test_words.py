"""The words of the package: plain English, with the patterns that a syntax tree can show."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "torchtitan"
MODULES = sorted(PACKAGE.rglob("*.py"))

HEADLESS = re.compile(r"(What|Of|Where|Which|How|Who|Whose|Those|That)\b")
"""A docstring starts with a verb (function), a noun (class, field), or Whether."""
TWISTED = re.compile(r"\b(what of|of what|of those|that of which)\b", re.IGNORECASE)
ODD = re.compile(
    r"\b(anew|dear|dearer|dearest|come out even|comes out even|the least|the most of|whoever|nobody"
    r"|be told|is told|are told|be said|has to be said|at the begin|the begin of|beside|at the most"
    r"|stands in|stands? on|come out|comes out|goes on|lies on|lie on|lying|dealt out|of late"
    r"|steps? over|stepped over|go on|so many|has to be|have to be)\b",
    re.IGNORECASE,
)
"""Words that say in a private way what the field has a term for."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Every docstring of a module, of fields too, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        for body in (getattr(node, "body", ()), getattr(node, "orelse", ())):
            for each in body if isinstance(body, list) else ():
                if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                    text = each.value.value
                    if isinstance(text, str):
                        yield each.lineno, text.strip()


def faults(path: Path) -> Iterator[str]:
    for line, text in docstrings(path):
        for pattern, find in ((HEADLESS, "match"), (TWISTED, "search"), (ODD, "search")):
            if found := getattr(pattern, find)(text):
                first = text.splitlines()[0] if text else ""
                yield f"{path.relative_to(PACKAGE)}:{line}: {found[0]!r} in {first!r}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_are_plain_english(path: Path) -> None:
    assert not list(faults(path))
