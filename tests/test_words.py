"""The words of the package: plain English, with the patterns that a syntax tree can show."""

import ast
import re

from tests.sources import MODULES, PAGES, ROOT, nodes, pages_of_settings, place, text

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
    prediction, MXFP8, optimizer-in-backward, parameter groups, pipeline parallelism, preemption,
    QSDP, restarts, S3, stragglers, TensorBoard, tensor parallelism, torch.compile, unbiased,
    z-loss, ZeRO
"""
"""Terms that a reader searches for, each of which is in a heading."""


def docstrings(path):
    """Every docstring of a module, of fields too, with its line."""
    for node in nodes(path):
        for body in (getattr(node, "body", ()), getattr(node, "orelse", ())):
            for each in body if isinstance(body, list) else ():
                if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                    found = each.value.value
                    if isinstance(found, str):
                        yield each.lineno, found.strip()


def faults(path):
    for line, docstring in docstrings(path):
        for pattern, find in ((HEADLESS, "match"), (TWISTED, "search"), (ODD, "search")):
            if found := getattr(pattern, find)(docstring):
                first = docstring.splitlines()[0] if docstring else ""
                yield f"{place(path)}:{line}: {found[0]!r} in {first!r}"


def test_docstrings_are_plain_english():
    assert [fault for path in MODULES for fault in faults(path)] == []


def test_pages_use_the_terms_of_the_field():
    found, pages = [], {page: text(page) for page in PAGES if page.name != "CHANGELOG.md"}
    for page, written in (pages | pages_of_settings()).items():
        prose = re.sub(r"^```.*?^```$", "", written, flags=re.MULTILINE | re.DOTALL)
        words = PRIVATE.finditer(" ".join(prose.split()))
        found += [f"{page.relative_to(ROOT)}: {each[0]}" for each in words]
    assert found == []


def test_terms_that_are_searched_are_headings():
    pages = "\n".join(text(page) for page in PAGES if page.name != "CHANGELOG.md")
    headings = "\n".join(re.findall(r"^#+ (.+)$", pages, re.MULTILINE)).lower()
    terms = (" ".join(term.split()) for term in SEARCHED.split(","))
    assert [term for term in terms if term.lower() not in headings] == []
