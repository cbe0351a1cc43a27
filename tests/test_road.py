"""The road of a run: what to read to follow plain FSDP 2 from `torchtitan train` to a step's end.

A recipe is trained under a profiler. A file is on the road if one of its functions was called,
unless it need not be read to follow the road (`ASIDE`). Only functions that were called are
counted, with their docstrings; the others belong to features that are off.
"""

import ast
import re
import sys
from pathlib import Path

from tests.ranks import run_ranks
from tests.tables import table
from torchtitan.trainer import main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torchtitan"

ASIDE = {title: tuple(places) for title, *places in table(__file__, "road.txt")}
"""What a run calls beside the road; `settings.py` of any package."""


def called(folder):
    """Train a step; return the functions of the package that it calls, by file and first line."""
    codes = {}

    def note(frame, event, argument):
        if event == "call":
            codes.setdefault(frame.f_code)

    # In host memory, since FSDP 2 then shards over one rank, too.
    words = [
        *("debug_model", "--job.dump_folder", folder, "--training.steps", "1"),
        *("--training.enable_cpu_offload", "--no-checkpoint.enable", "--no-validation.enable"),
    ]
    sys.setprofile(note)
    try:
        assert main(words) == 0
    finally:
        sys.setprofile(None)
    paths = [(Path(code.co_filename), code.co_firstlineno) for code in codes]
    inside = [(path, line) for path, line in paths if path.is_relative_to(PACKAGE)]
    return [(path.relative_to(PACKAGE).as_posix(), line) for path, line in inside]


def is_aside(path):
    return any(path.startswith(names) or path.endswith("/settings.py") for names in ASIDE.values())


def lines_called(path, lines):
    """Count the lines of the functions that begin in `lines`, or that contain one that does."""
    functions = [
        node
        for owner in ast.walk(ast.parse((PACKAGE / path).read_text()))
        if isinstance(owner, ast.Module | ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
    ]
    spans = [
        (min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.end_lineno or 0)
        for node in functions
    ]
    return sum(
        end - first + 1 for first, end in spans if any(first <= line <= end for line in lines)
    )


def test_the_road_is_what_the_architecture_lists(tmp_path):
    """In at most 8 files, 1,600 lines of functions."""
    (found,) = run_ranks(called, 1, str(tmp_path))
    road = {}
    for path, line in found:
        if not is_aside(path):
            road.setdefault(path, set()).add(line)
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("\n## The road\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", section, re.M)
    assert set(listed) == road.keys()
    assert len(listed) <= 8
    count = {path: lines_called(path, lines) for path, lines in road.items()}
    assert sum(count.values()) <= 1_600, count
