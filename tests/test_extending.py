"""Each kind of extension works, takes as few files as promised, and is refused if it lacks a part.

The files of a case are written next to the recipe; those that it edits are in a copy of the
package. It then trains two steps on two ranks, in a forked process.
"""

import importlib
import math
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import forked
from tests.tables import data
from tests.test_docs import ROOT, blocks
from torchtitan.config.registry import PACKAGE
from torchtitan.tools.cli import main

PAGE = {b.marks["file"]: b.text for b in blocks(ROOT / "docs/extending.md") if "file" in b.marks}
ALWAYS = [
    *("--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=2"),
    *("--training.mixed_precision_param=float32", "--checkpoint.enable=false"),
    *("--metrics.log_freq=1", "--lr_scheduler.warmup_steps=1", "--job.dump_folder=out"),
    "--parallelism.data_parallel_shard_degree=2",
]
TINY = ["--model.name=tiny", "--model.flavor=tiny"]
FAMILY = (PACKAGE / "models/qwen3.py").read_text(encoding="utf-8")
SMALL = ["--model.flavor=debugmodel", "--model.n_layers=2", "--model.dim=64", "--model.n_heads=4"]
MODULES = data(__file__, "extensions.toml")
IMPORT = "from torchtitan.gradient_noise import"


@dataclass(frozen=True)
class Case:
    """An extension, and what shows that it acts."""

    most: int
    """Files that it may take."""
    flags: list[str]
    files: dict[str, str]
    """New files, and their contents."""
    edits: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Files of the package: each text there gets another before it."""
    data: dict[str, str] = field(default_factory=dict)
    shows: str = "all(row['loss'] > 0 for row in rows)"


CASES = {
    "a family like Llama": Case(
        1,
        ["--job.imports=mine", "--model.name=mine", *SMALL, "--model.n_kv_heads=2"],
        {
            "mine.py": f"{FAMILY.replace('qwen3', 'mine')}\nfrom torchtitan.models import MODELS\n"
            'MODELS["mine"] = QWEN3\n'
        },
    ),
    "a family with a block of its own": Case(
        4,
        ["--job.imports=my_decoder", "--model.name=after", "--model.flavor=tiny"],
        {"my_decoder.py": PAGE["my_decoder.py"]},
    ),
    "an optimizer": Case(
        1,
        [*TINY, "--job.imports=mine", "--optimizer.name=Lion"],
        {"mine.py": PAGE["my_optimizer.py"]},
    ),
    "an optimizer that communicates": Case(
        4,
        [*TINY, "--job.imports=mine", "--optimizer.name=Moved"],
        {"mine.py": (ROOT / "tests/normalized.py").read_text().replace('"Normalized"', '"Moved"')},
    ),
    "a sink": Case(
        1,
        [*TINY, "--job.imports=mine"],
        {"mine.py": MODULES["sink"]},
        shows="len(Path('out/loss.csv').read_text().splitlines()) == 2",
    ),
    "a data format": Case(
        1,
        [*TINY, "--job.imports=my_csv", "--data.dataset=words.csv"],
        {"my_csv.py": PAGE["my_csv.py"]},
        data={"words.csv": PAGE["words.csv"]},
    ),
    "a schedule": Case(
        1,
        [*TINY, "--job.imports=mine", "--lr_scheduler.name=halves", "--optimizer.lr=1"],
        {"mine.py": MODULES["schedule"]},
        shows="[row['lr'] for row in rows if 'lr' in row] == [1.0, 1.0]",
    ),
    "a local key": Case(
        1,
        [*TINY, "--lr_scheduler.idle_steps=1", "--optimizer.lr=1"],
        {},
        {
            "optim/schedule.py": [
                ("    def warmup(", "    idle_steps: int = 0\n    '''More warm-up.'''\n\n"),
                ("min(self.warmup_steps,", "self.idle_steps + "),
            ]
        },
        shows="[row['lr'] for row in rows if 'lr' in row] == [0.5, 1.0]",
    ),
    "a key that cuts across": Case(
        4,
        [*TINY, "--noise.std=10"],
        {"torchtitan/gradient_noise.py": MODULES["gradient_noise"]},
        {
            "job.py": [
                ("from torchtitan.losses", f"{IMPORT} NoiseConfig\n"),
                ("    spikes: SpikesConfig", "    noise: NoiseConfig = NoiseConfig()\n"),
            ],
            "build.py": [
                ("from torchtitan.inputs", f"{IMPORT} gradient_noise\n"),
                (
                    "    if job.metrics.statistics_freq:",
                    "    if job.noise.std:\n        yield gradient_noise(job.noise, model)\n",
                ),
            ],
        },
        shows="all(row['grad_norm'] > 100 for row in rows if 'grad_norm' in row)",
    ),
}


def write(case, folder):
    """Write the files of a case, and edit its own in a copy of the package."""
    if case.edits:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, folder / "torchtitan", ignore=ignored)
    for name, text in {**case.files, **case.data}.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, edits in case.edits.items():
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
    if case.edits:
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("torchtitan", "tests"):
                del sys.modules[name]
    runs, ranks = importlib.import_module("tests.runs"), importlib.import_module("tests.ranks")
    checks = importlib.import_module("torchtitan.checks")
    job = checks.load_job(None, [*ALWAYS, *case.flags], 2, "cpu").config
    ranks.run_ranks(runs.train, 2, job)
    rows = runs.rows(Path("out"))
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2, rows
    assert all(map(math.isfinite, losses)), losses
    shown = [row for row in rows if "loss" in row]
    assert eval(case.shows, {"rows": shown, "Path": Path}), f"{case.shows}: {shown}"


@pytest.mark.costs("two ranks that train")
@pytest.mark.parametrize("name", CASES)
def test_it_trains_and_takes_few_files(name, tmp_path):
    case = CASES[name]
    assert len(case.files) + len(case.edits) <= case.most
    write(case, tmp_path)
    done = forked.run(lambda: trains(case), tmp_path)
    assert done.status == 0, done.stdout + done.stderr


@pytest.mark.parametrize("family", ["qwen3_?moe", "deepseek_?v3", "gpt_?oss"])
def test_a_family_with_a_block_of_its_own_is_named_in_few_files(family):
    named = re.compile(rf"(?i){family.replace('_', '[-_ ]')}")
    files = [p for p in PACKAGE.rglob("*.py") if named.search(p.read_text(encoding="utf-8"))]
    assert 2 <= len(files) <= 4, files


@pytest.mark.parametrize("mistake", MODULES["lacking"])
def test_what_lacks_a_part_is_refused_with_its_line(mistake, tmp_path, monkeypatch, capsys):
    lacking = MODULES["lacking"][mistake]
    (tmp_path / "mine.py").write_text(lacking["module"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", "debug_model", "--job.imports", "mine"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--job.imports: got" in said
    assert lacking["said"] in said
