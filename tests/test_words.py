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


PAGES = [
    *(PACKAGE.parent / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((PACKAGE.parent / "docs").rglob("*.md")),
    *sorted(PACKAGE.glob("research/*/README.md")),
]
PRIVATE = re.compile(
    r"\b(few bits|ways? to send|runs? apart|middle half|steps in the backward|what rounding takes"
    r"|right in the mean|anew|all the same|at the least|at the most"
    r"|(ms|bytes|GiB|GB|MB|messages|tokens|images|numbers|seconds) a"
    r" (step|rank|parameter|second|device|GPU|microbatch|token|number))\b"
)
"""Words that a reader would not search for: the field says low-bit, per step, IQR, unbiased."""
SEARCHED = """
    8-bit attention, activation checkpointing, auxiliary losses, context parallelism, crashed or
    hung, data parallelism, DCP, DeMo, DiLoCo, error feedback, Float8, FSDP, GaLore, HSDP, Hugging
    Face, infrequent synchronization, lm-evaluation-harness, local SGD, loss spikes, low-bit
    gradients, low-bit optimizer states, low-bit weights, Muon, multi-node, multi-token
    prediction, MXFP8, optimizer offload, optimizer-in-backward, parameter groups, pipeline
    parallelism, preemption, QSDP, restarts, S3, stragglers, TensorBoard, tensor parallelism,
    torch.compile, unbiased, z-loss, ZeRO
"""
"""Terms that a reader searches for, each of which is in a heading."""


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PACKAGE.parent)))
def test_pages_use_the_terms_of_the_field(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [found[0] for found in PRIVATE.finditer(" ".join(prose.split()))] == []


def test_terms_that_are_searched_are_headings() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    headings = "\n".join(re.findall(r"^#+ (.+)$", text, re.MULTILINE)).lower()
    terms = (" ".join(term.split()) for term in SEARCHED.split(","))
    assert [term for term in terms if term.lower() not in headings] == []
