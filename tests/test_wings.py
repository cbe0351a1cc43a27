"""The core stands without its wings, each wing without the others, and so does each system.

Copies of the package pass tests that are quick and telling; `-m slow` runs all that a default run
has.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.tables import data
from tests.tiers import tiers
from torchtitan.config.registry import WINGS
from torchtitan.research import ENTRIES

ROOT = Path(__file__).parent.parent
RESEARCH = ROOT / "torchtitan/research"
SYSTEMS = sorted({path.stem for path in RESEARCH.iterdir()} - {"__init__", "__pycache__", "common"})
SHARED = [f"tests/research/test_{name}.py" for name in ("codec", "layouts", "recipes")]
"""Tests of research that fit the systems that are there."""
ALONE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "__name__", "") != "_EditableFinder"]
"""
"""Run by every Python of a copy: an editable install would find what the copy does not have."""
CORE = [
    "tests/test_house.py::test_imports_point_down",
    "tests/test_house.py::test_own_modules_are_imported_at_the_top",
    "tests/test_house.py::test_the_main_road_knows_no_images",
    *("tests/unit/config", "tests/unit/models/test_llama3.py"),
    *("tests/unit/test_auxiliary.py", "tests/unit/optim/test_schedule.py"),
    *("tests/recipes/test_bad_recipes.py", "tests/parallel/test_parity.py"),
]
LAYOUTS = "(not trains_the_same_run or DDP) and not compiles and not how_to_start_them"
"""Of those, the layouts that are compared, and nothing that is compiled or launched."""
TABLE = data(__file__, "wings.toml")
KEYS = ["--metrics.serve=:9090", "--job.manifest.cpus=2"]
"""Keys of the core that only `cluster` heeds."""


def copy_with(wings, folder, systems=SYSTEMS):
    """A copy of the project that has these wings, and of research these systems, alone."""
    copy_package(wings, folder, systems)
    absent = {*WINGS, *SYSTEMS} - {*wings, *systems}

    def needless(where, names):
        files = {name: (Path(where) / name).relative_to(ROOT) for name in names}
        return {"__pycache__"} | {
            name for name, path in files.items() if path.suffix == ".py" and needed(path) & absent
        }

    for path in ROOT.iterdir():
        if path.name == "tests":
            shutil.copytree(path, folder / path.name, ignore=needless)
        elif path.name in {"torchtitan", "outputs"}:
            continue  # the package is copied, and each copy has the runs of its own
        elif path.name == ".ci" or not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    return folder


def copy_package(wings, folder, systems=SYSTEMS):
    """Copy the wings of the package, and link to the core."""
    package = folder / "torchtitan"
    package.mkdir()
    others = {*SYSTEMS} - {*systems}
    left_out = shutil.ignore_patterns("__pycache__", *others, *(f"{name}.*" for name in others))
    for path in (ROOT / "torchtitan").iterdir():
        if path.name in wings:
            shutil.copytree(path, package / path.name, ignore=left_out)
        elif path.name not in WINGS and path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    (folder / "sitecustomize.py").write_text(ALONE)


@cache
def needed(path):
    """The wings and the systems that a file of tests, or one that it imports, imports."""
    found = set()
    seen, left = {path}, [path]
    while left:
        for module in imported(left.pop()):
            parts = module.split(".")
            if parts[0] == "torchtitan":
                found |= {*parts[1:2]} & {*WINGS}
                found |= {*parts[2:3]} & {*SYSTEMS} if parts[1:2] == ["research"] else set()
            file = Path(*parts).with_suffix(".py")
            if parts[0] == "tests" and (ROOT / file).is_file() and file not in seen:
                seen.add(file)
                left.append(file)
    return frozenset(found)


def imported(path):
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield str(node.module)


def run_in(folder, *words):
    """Run Python with the package of a copy."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def pytest_in(folder, *words):
    """Run tests of a copy."""
    found = run_in(folder, "-c", "import torchtitan as found; print(*found.__path__)")
    assert found.stdout.split() == [str(folder / "torchtitan")], "another package is seen"
    done = run_in(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_every_system_is_registered():
    folders = {re.split("[.:]", place)[0] for kind in ENTRIES.values() for place in kind.values()}
    assert folders == {*SYSTEMS, "common"}


def test_tests_have_the_name_of_the_system_that_they_import():
    for path in sorted((ROOT / "tests/research").glob("test_*.py")):
        for system in needed(path.relative_to(ROOT)) & {*SYSTEMS}:
            assert path.name.startswith(f"test_{system}"), f"{path.name} imports {system}"


@pytest.mark.gate
def test_the_core_without_wings(tmp_path):
    folder = copy_with((), tmp_path)
    pytest_in(folder, *CORE, "-k", LAYOUTS)
    words = ["--standalone", "--nproc-per-node=2", "-m", "torchtitan.train", "--training.steps=2"]
    recipe = "--job.config_file=train_configs/debug_model.toml"
    layout = "--parallelism.data_parallel_shard_degree=2"
    done = run_in(folder, "-m", "torch.distributed.run", *words, recipe, layout)
    assert done.returncode == 0, done.stderr[-4000:]
    for wing in TABLE["wings"].values():
        assert_refused(folder, wing["words"].split(), wing["reason"])
    for flag in KEYS:
        words = ["check", "debug_model", flag]
        assert_refused(folder, words, "it needs torchtitan.cluster, which is not installed")
    planned = run_in(folder, "-m", "torchtitan", "check", "debug_model", "--plan")
    assert "planned memory: unknown, as it needs torchtitan.plan" in planned.stdout


def assert_refused(folder, words, reason):
    done = run_in(folder, "-m", "torchtitan", *words)
    assert done.returncode == 2, words
    assert "Traceback" not in done.stderr
    assert reason in done.stderr
    assert "not installed: torchtitan." in done.stderr


@pytest.mark.gate
@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_without_the_others(wing, tmp_path):
    folder = copy_with({wing}, tmp_path)
    own = TABLE["wings"][wing]
    done = run_in(folder, "-m", "torchtitan", *own["uses"].split())
    assert done.returncode == 0, done.stderr[-4000:]
    assert own["prints"] in done.stdout + done.stderr
    for other in (TABLE["wings"][name] for name in {*WINGS} - {wing}):
        assert_refused(folder, other["words"].split(), other["reason"])


@pytest.mark.costs("a process that imports torch")
def test_a_refusal_names_the_systems_that_are_not_installed(tmp_path):
    copy_package(WINGS, tmp_path)
    shutil.rmtree(tmp_path / "torchtitan/research/galore")
    done = run_in(tmp_path, "-m", "torchtitan", "check", "debug_model", "--optimizer.name=GaLore")
    assert done.returncode == 2
    assert 'got "GaLore"' in done.stderr
    assert done.stderr.endswith("note: not installed: torchtitan.research.galore\n")


@pytest.mark.costs("a process that imports torch")
@pytest.mark.parametrize("mistake", TABLE["mistakes"])
def test_a_wing_that_is_half_there_is_refused(mistake, tmp_path):
    mistake = TABLE["mistakes"][mistake]
    copy_package(WINGS, tmp_path)
    path = tmp_path / "torchtitan" / mistake["file"]
    path.unlink()
    if "content" in mistake:
        path.write_text(mistake["content"])
    done = run_in(tmp_path, "-m", "torchtitan", "preflight", "debug_model")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert mistake["said"] in " ".join(done.stderr.split()), done.stderr


@pytest.mark.slow
def test_the_whole_core_without_wings(tmp_path):
    words = [f"tests/{name}" for name in ("unit", "recipes", "parallel", "training")]
    pytest_in(copy_with((), tmp_path), *words, "-k", f"not ({' or '.join(TABLE['use_wings'])})")


@pytest.mark.parametrize("system", tiers(SYSTEMS, [], gate=["qsdp"]))
def test_a_system_without_the_others(system, tmp_path):
    folder = copy_with(WINGS, tmp_path, {system})
    there = {path.stem for path in (folder / "torchtitan/research").iterdir()}
    assert there - {"__init__", "__pycache__"} == {system, "common"}
    own = sorted(path.name for path in (ROOT / "tests/research").glob(f"test_{system}*.py"))
    pytest_in(folder, *(f"tests/research/{name}" for name in own), *SHARED)
