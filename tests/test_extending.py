"""Each kind of extension works, takes as few files as promised, and is refused if it lacks a part.

The files of a case are written next to the recipe; those that it edits are in a copy of the
package. It then trains two steps on two ranks, in a forked process.
"""

import importlib
import math
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.tables import data
from tests.test_docs import ROOT, blocks
from torchtitan.config.registry import PACKAGE

PAGE = {b.marks["file"]: b.text for b in blocks(ROOT / "docs/extending.md") if "file" in b.marks}
ALWAYS = [
    *("--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=2"),
    *("--training.mixed_precision_param=float32", "--checkpoint.enable=false"),
    *("--metrics.log_freq=1", "--lr_scheduler.warmup_steps=1", "--job.dump_folder=out"),
    "--parallelism.data_parallel_shard_degree=2",
]
FAMILY = (PACKAGE / "models/qwen3.py").read_text(encoding="utf-8").replace("qwen3", "mine")
MOVED = (ROOT / "tests/normalized.py").read_text().replace('"Normalized"', '"Moved"')
MODULES = data(__file__, "extensions.toml")
TEXTS = PAGE | MODULES["texts"] | {"normalized.py": MOVED}
TEXTS["family.py"] = f'{FAMILY}\nfrom torchtitan.models import MODELS\nMODELS["mine"] = QWEN3\n'
CASES = {
    name: {"files": {}, "edits": {}, "shows": "all(row['loss'] > 0 for row in rows)"} | case
    for name, case in MODULES["trains"].items()
}


def write(case, folder):
    """Write the files of a case, and edit its own in a copy of the package."""
    if case["edits"]:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, folder / "torchtitan", ignore=ignored)
    for name, of in (case["files"] | case.get("data", {})).items():
        (folder / name).write_text(TEXTS[of], encoding="utf-8")
    for name, edits in case["edits"].items():
        path = folder / "torchtitan" / name
        text = path.read_text(encoding="utf-8")
        for before, new in edits:
            assert text.count(before) == 1, f"{name}: {before}"
            text = text.replace(before, new + before)
        path.write_text(text, encoding="utf-8")


def trains(case):
    """Train in this process, which was forked, and import the copy of the package if there is one.

    Torch itself is imported already.
    """
    if case["edits"]:
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("torchtitan", "tests"):
                del sys.modules[name]
    runs, ranks = importlib.import_module("tests.runs"), importlib.import_module("tests.ranks")
    checks = importlib.import_module("torchtitan.checks")
    job = checks.load_job(None, [*ALWAYS, *case["flags"].split()], 2, "cpu").config
    ranks.run_ranks(runs.train, 2, job)
    rows = runs.rows(Path("out"))
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2, rows
    assert all(map(math.isfinite, losses)), losses
    shown = [row for row in rows if "loss" in row]
    assert eval(case["shows"], {"rows": shown, "Path": Path}), f"{case['shows']}: {shown}"


@pytest.mark.costs("two ranks that train")
@pytest.mark.parametrize("name", CASES)
def test_it_trains_and_takes_few_files(name, tmp_path):
    case = CASES[name]
    assert len(case["files"]) + len(case["edits"]) <= case["most"]
    write(case, tmp_path)
    done = forked.run(lambda: trains(case), tmp_path)
    assert done.status == 0, done.stdout + done.stderr


@pytest.mark.parametrize("family", ["qwen3_?moe", "deepseek_?v3", "gpt_?oss"])
def test_a_family_with_a_block_of_its_own_is_named_in_few_files(family):
    named = re.compile(rf"(?i){family.replace('_', '[-_ ]')}")
    files = [p for p in PACKAGE.rglob("*.py") if named.search(p.read_text(encoding="utf-8"))]
    assert 2 <= len(files) <= 4, files


@pytest.mark.parametrize("mistake", MODULES["lacking"])
def test_what_lacks_a_part_is_refused_with_its_line(mistake, tmp_path, monkeypatch, says):
    lacking = MODULES["lacking"][mistake]
    (tmp_path / "mine.py").write_text(lacking["module"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    said = " ".join(says("check", "debug_model", "--job.imports", "mine", status=2).split())
    assert "--job.imports: got" in said
    assert lacking["said"] in said
