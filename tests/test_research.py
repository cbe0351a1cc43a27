"""The main road stands without the systems from papers, and each of them without the others.

Copies of the package, without `research/` or with one folder of it, pass tests that are quick and
telling; `-m slow` runs all that a default run has.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import tiers
from torchtitan.research import ENTRIES

ROOT = Path(__file__).parent.parent
SYSTEMS = {
    "auxiliary_tasks": ["test_auxiliary_tasks.py"],
    "demo": ["test_demo.py"],
    "diloco": ["test_diloco.py"],
    "galore": ["test_galore.py", "test_galore_parallel.py"],
    "hadamard_attention": ["test_hadamard_attention.py"],
    "loco": ["test_loco.py", "test_codec.py"],
    "low_bit": ["test_low_bit.py", "test_low_bit_parallel.py"],
    "qk_clip": ["test_qk_clip.py", "test_qk_clip_parallel.py"],
    "qsdp": ["test_qsdp.py", "test_codec.py"],
    "ranger21": ["test_ranger21.py", "test_ranger21_parallel.py"],
    "rtp": ["test_rtp.py"],
    "simple_fsdp": ["test_simple_fsdp.py"],
    "vit_mae": ["test_vit_mae.py", "test_vit_mae_recipes.py", "test_vit_mae_settings.py"],
}
"""The tests of each, in tests/research."""
ALONE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "__name__", "") != "_EditableFinder"]
"""
"""Run by every Python of a copy: an editable install would find what the copy does not have."""
QUICK = {
    "auxiliary_tasks": "by_hand or takes_a_head or refused",
    "demo": "scipy or divisor or turn or mean_over",
    "diloco": "nesterov",
    "galore": "numpy or formula or refused",
    "hadamard_attention": "refused or rotation_alone or formats",
    "loco": "errors_of_loco or are_noted",
    "low_bit": "to_the_bit and 4bit or left_as or bytes_of",
    "qk_clip": "all_scores or scaled_down or refused or has_the",
    "qsdp": "same_weights or in_the_mean",
    "ranger21": "schedule or adamw",
    "rtp": "gradients or in_place_is_sent",
    "simple_fsdp": "eager_run_keeps or old_names or sends_as or tied",
    "vit_mae": "published or visible or mistake",
}
"""Which of them are run alone, besides a few steps of its recipe."""
MAIN_ROAD = [
    "tests/test_house.py::test_imports_point_down",
    "tests/test_house.py::test_own_modules_are_imported_at_the_top",
    "tests/test_house.py::test_the_main_road_knows_no_images",
    *("tests/unit/config", "tests/unit/models/test_llama3.py"),
    *("tests/unit/test_auxiliary.py", "tests/unit/optim/test_schedule.py"),
    *("tests/recipes/test_bad_recipes.py", "tests/recipes/test_recipes.py"),
    "tests/parallel/test_parity.py",
]
LAYOUTS = "(not trains_the_same_run or DDP) and not compiles"
"""Of those, the layouts that are compared, and nothing that is compiled."""


def copy_with(systems: set[str], folder: Path) -> Path:
    """A copy of the project that has these systems alone."""

    def left_out(where: str, names: list[str]) -> set[str]:
        if Path(where) == ROOT / "torchtitan" and not systems:
            return {"research"}
        if Path(where) == ROOT / "torchtitan/research":
            kept = systems | {"common"}
            return {name for name in names if (ROOT / where / name).is_dir()} - kept
        cached = {"__pycache__"} & set(names)
        return cached | ({"research"} if Path(where) == ROOT / "tests" and not systems else set())

    for path in ROOT.iterdir():
        if path.name in ("torchtitan", "tests"):
            shutil.copytree(path, folder / path.name, ignore=left_out)
        elif not path.name.startswith(".") or path.name == ".ci":
            (folder / path.name).symlink_to(path)
    (folder / "sitecustomize.py").write_text(ALONE)
    return folder


def pytest_in(folder: Path, *words: str) -> None:
    """Run tests of the copy, with the copy's package."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", "import torchtitan.research as found; print(*found.__path__)"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    own = folder / "torchtitan/research"
    assert found.stdout.split() == [str(own)] * own.exists(), "another package is seen"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_every_folder_is_named() -> None:
    folders = {place.split(".")[0] for kind in ENTRIES.values() for place in kind.values()}
    assert folders == {*SYSTEMS, "common"}


@pytest.mark.gate
def test_the_main_road_without_systems(tmp_path: Path) -> None:
    folder = copy_with(set(), tmp_path)
    assert not (folder / "torchtitan/research").exists()
    pytest_in(folder, *MAIN_ROAD, "-k", LAYOUTS)


@pytest.mark.parametrize("system", tiers(SYSTEMS, [], gate=["qsdp"]))
def test_a_system_without_the_others(system: str, tmp_path: Path) -> None:
    folder = copy_with({system}, tmp_path)
    there = {path.name for path in (folder / "torchtitan/research").iterdir() if path.is_dir()}
    assert there - {"__pycache__"} == {system, "common"}
    files = [f"tests/research/{name}" for name in SYSTEMS[system]]
    # Those of another system, and inductor's, are in the default run or in the gate by themselves.
    pytest_in(
        folder, *files, "tests/research/test_recipes.py", "-k", f"{QUICK[system]} or {system}]"
    )


@pytest.mark.slow
def test_the_whole_main_road_without_systems(tmp_path: Path) -> None:
    folder = copy_with(set(), tmp_path)
    pytest_in(folder, "tests/unit", "tests/recipes", "tests/parallel", "tests/training")


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_whole_of_a_system_without_the_others(system: str, tmp_path: Path) -> None:
    folder = copy_with({system}, tmp_path)
    pytest_in(
        folder,
        *(f"tests/research/{name}" for name in SYSTEMS[system]),
        *("tests/research/test_layouts.py", "tests/research/test_recipes.py"),
    )
