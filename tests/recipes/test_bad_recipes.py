"""Bad recipes: every mistake at once, a line each, exit status 2, and nothing is started."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from torchtitan.checks import load_job, problems
from torchtitan.checks.services import restarts
from torchtitan.config import PlannedWorld, RecipeError, listed
from torchtitan.convert import CONVERTERS
from torchtitan.data import DATASETS
from torchtitan.data.settings import DATA
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.optim import OPTIMIZERS, SCHEDULES

pytestmark = pytest.mark.usefixtures("in_empty_folder")
TABLE = Path(__file__).with_name("bad_recipes.txt")
DEFAULTS = JobConfig()
HELP = "torchtitan train --help"
ALLOWED = {
    "{SECTIONS}": listed(JobConfig.model_fields, HELP),
    "{DATASETS}": ", ".join(DATASETS),
    "{TRAINING}": listed(type(DEFAULTS.training).model_fields, f"{HELP} training"),
    "{DATA}": listed([*type(DEFAULTS.data).model_fields, *DATA], f"{HELP} data"),
    "{CHECKPOINT}": listed(type(DEFAULTS.checkpoint).model_fields, f"{HELP} checkpoint"),
    "{OPTIMIZERS}": ", ".join(OPTIMIZERS),
    "{ADAMW}": listed(OPTIMIZERS["AdamW"].model_fields, f"{HELP} optimizer"),
    "{SGD}": listed(OPTIMIZERS["SGD"].model_fields, f"{HELP} optimizer"),
    "{LLAMA3}": listed(type(DEFAULTS.model).model_fields, f"{HELP} model"),
    "{SCHEDULES}": ", ".join(SCHEDULES),
    "{MODELS}": ", ".join(MODELS),
    "{CONVERTERS}": ", ".join(CONVERTERS),
    "{FLOAT8}": listed(CONVERTERS["float8"].model_fields, f"{HELP} convert"),
    "{MXFP8}": listed(CONVERTERS["mxfp8"].model_fields, f"{HELP} convert"),
}


class Case(NamedTuple):
    """One case of the table."""

    name: str
    flags: list[str]
    world: int | None
    recipe: str
    lines: list[str]


def cases(table=TABLE):
    """The cases of a table, in order."""
    result = []
    for text in table.read_text(encoding="utf-8").split("\n=== ")[1:]:
        name, *rest = text.rstrip("\n").split("\n")
        words = rest.pop(0).split()[1:] if rest[0].startswith("$ ") else []
        world = int(words.pop()) if "--world-size" in words else None
        lines = [line[2:] for line in rest if line.startswith("> ")]
        backends = sorted({"eager", "aot_eager", *torch.compiler.list_backends()})  # now
        for mark, names in (ALLOWED | {"{BACKENDS}": ", ".join(backends)}).items():
            lines = [line.replace(mark, names) for line in lines]
        recipe = "".join(f"{line}\n" for line in rest if not line.startswith("> "))
        result.append(Case(name, [w for w in words if w != "--world-size"], world, recipe, lines))
    return result


def lines_said(path, flags, world):
    """What is said of a recipe that is refused."""
    with pytest.raises(RecipeError) as error:
        load_job(path, flags, world, "cpu")
    return error.value.lines


def is_refused(case, tmp_path, monkeypatch):
    """With all lines that the table has."""
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text(case.recipe, encoding="utf-8")
    assert lines_said("bad.toml", case.flags, case.world) == case.lines, case.name


@pytest.mark.costs("every recipe of the table")
def test_each_mistake_is_said_as_in_the_table(tmp_path, monkeypatch):
    wrong = []
    has_server = importlib.util.find_spec("torchtitan.cluster") is not None
    for case in cases():
        if "--metrics.serve" in case.flags and not has_server:
            continue
        try:
            is_refused(case, tmp_path, monkeypatch)
        except (AssertionError, pytest.fail.Exception) as error:
            wrong.append(f"{case.name}: {error}")
    assert not wrong, "\n".join(wrong)


def test_table_is_read_whole():
    found = cases()
    assert len(found) >= 60
    assert len({case.name for case in found}) == len(found)
    assert all(case.lines for case in found)


def test_mistakes_of_an_extended_recipe_have_its_name():
    Path("base").mkdir()
    Path("base/b.toml").write_text("[training]\n\nsteps = 0\n", encoding="utf-8")
    Path("mine.toml").write_text('extends = "base/b.toml"\n[job]\nname = "x"\n', encoding="utf-8")
    said = lines_said("mine.toml", [], None)
    assert [line.split(":")[:3] for line in said] == [
        ["base/b.toml", "3", " training.steps"],
        ["mine.toml", "3", " job.name"],
    ]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "x.toml: there is no such recipe; did you mean xy.toml?"),
        ("folder", "x.toml: is a folder; wanted a recipe, a file of TOML"),
        ("link", "x.toml: is a link to gone.toml, where there is no file"),
        ("pipe", "x.toml: is a pipe or a device; a recipe is read more than once, so write it to"),
        (b"[job]\ndescription = '\xe9t\xe9'\n", "x.toml:2: not UTF-8 text: got the byte 0xe9"),
        (b"\xff\xfe[\x00", "x.toml:1: not UTF-8 text: got the byte 0xff"),
        (b"\xef\xbb\xbf[job]\r\n\r\nname = 1\r\n", "x.toml:3: job.name: unknown key; allowed: "),
    ],
    ids=["missing", "folder", "link", "pipe", "Latin-1", "UTF-16", "byte order mark and CRLF"],
)
def test_files(content, line):
    Path("xy.toml").touch()
    if content == "folder":
        Path("x.toml").mkdir()
    elif content == "link":
        Path("x.toml").symlink_to("gone.toml")
    elif content == "pipe":
        os.mkfifo("x.toml")
    elif isinstance(content, bytes):
        Path("x.toml").write_bytes(content)
    said = lines_said("x.toml", [], None)
    assert len(said) == 1
    assert said[0].startswith(line)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("x.py", "TorchTitan 0.3's Python configs are not read; see docs/from_torchtitan.md"),
        ("x.yaml", "write the settings as TOML: docs/config.md"),
        ("x.json", "write the settings as TOML: docs/config.md"),
    ],
)
def test_a_recipe_of_another_format(name, fix):
    Path(name).write_text("from torchtitan import x\n", encoding="utf-8")
    assert lines_said(name, [], None) == [f"{name}: a recipe is a file of TOML; {fix}"]


def test_recipes_that_extend_each_other():
    for name, other in {"a": "b", "b": "c", "c": "a"}.items():
        Path(f"{name}.toml").write_text(f'extends = "{other}.toml"\n', encoding="utf-8")
    (line,) = lines_said("a.toml", [], None)
    assert line.startswith('c.toml:1: extends: got "a.toml"; ')
    assert line.endswith(": a.toml -> b.toml -> c.toml -> a.toml")


@pytest.mark.gate
@pytest.mark.parametrize("command", ["torchtitan.tools.cli check", "torchtitan.train"])
def test_commands_end_with_2_and_leave_nothing(command, tmp_path):
    recipe = tmp_path / "bad.toml"
    recipe.write_text(
        f'[job]\ndump_folder = "{tmp_path}/out"\n[training]\nstep = 5\n[optimizer]\nlr = 0\n',
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), str(recipe), "--compile.enable", "maybe"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert lines == [
        f"error: {recipe}:4: training.step: unknown key",
        "  did you mean training.steps?",
        f"  allowed: {ALLOWED['{TRAINING}']}",
        f"error: {recipe}:6: optimizer.lr: got 0",
        "  wanted a number > 0",
        'error: --compile.enable: got "maybe"',
        "  wanted true or false",
    ]
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == [recipe]


def test_tokenizer_that_cannot_be_read(says):
    Path("merges.model").write_text("bm90IGEgcmFuaw==\n", encoding="utf-8")
    recipe = '[model]\ntokenizer_path = "merges.model"\n'
    Path("bad.toml").write_text(recipe, encoding="utf-8")
    error = says("check", "bad.toml", status=2)
    assert error.startswith('error: bad.toml:2: model.tokenizer_path: got "merges.model"; ')
    assert error.count("error: ") == 1


def lacks(job, device_type):
    """What this machine lacks for a recipe that works elsewhere."""
    found = problems(job, PlannedWorld(None, device_type, is_here=True))
    return [problem for problem in found if problem.severity == "error"]


def test_replica_groups_need_torchft_and_a_lighthouse(monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = ["--fault_tolerance.enable", "--fault_tolerance.group_size=2"]
    job = load_job(None, words, 1, "cpu").config
    assert [problem[:2] for problem in lacks(job, "cpu")] == [
        ("fault_tolerance.enable", 'torchft is not installed: pip install "torchft>=0.2,<0.3"'),
        (
            "fault_tolerance.enable",
            "the address of the lighthouse is missing; set "
            "TORCHFT_LIGHTHOUSE=http://HOST:29510 in the environment",
        ),
    ]
    monkeypatch.undo()
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:29510")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert lacks(job, "cpu") == []


def test_replica_groups_have_ranks_that_stay_and_may_restart_without_checkpoints():
    words = ["--fault_tolerance.enable", "--fault_tolerance.group_size=2"]
    job = load_job(None, words, 2, "cpu").config
    assert list(restarts(job, PlannedWorld(2, may_restart=True))) == []
    said = lines_said(None, [*words, "--training.global_batch_size=64"], range(2, 5, 2))
    assert said == [
        "--fault_tolerance.enable: got true; the run may have 2 or 4 "
        "ranks; all replica groups need the same number"
    ]


def test_what_a_cpu_cannot_do_is_refused_there_and_nowhere_else():
    words = ["--parallelism.enable_async_tensor_parallel", "--compile.enable"]
    words += ["--parallelism.tensor_parallel_degree", "2", "--activation_checkpoint.mode", "none"]
    job = load_job(None, words, 2, "cpu").config
    (problem,) = lacks(job, "cpu")
    assert problem.path == "parallelism.enable_async_tensor_parallel"
    assert problem.message.startswith("SymmetricMemory does not support a CPU")
    assert lacks(job, "cuda") == []


def test_no_part_of_the_documents_is_held_out_by_zero():
    Path("r.toml").write_text("[data]\nvalidation_fraction = 0\n", encoding="utf-8")
    assert load_job("r.toml", [], 1, "cpu").config.data.validation_fraction is None
