"""`run_train.sh` and `scripts/test` find the environment that they run in."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def clone(tmp_path):
    """What a second clone has of it, and the package's name."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan/__init__.py").touch()
    return tmp_path


def sourced(clone, command):
    """A command after scripts/environment.sh, which may not download anything."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'source scripts/environment.sh ""; {command}'],
        cwd=clone,
        env=os.environ | {"PATH": path, "PIP_NO_INDEX": "1", "PYTHONPATH": "/elsewhere"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_second_clone_uses_the_active_environment_and_its_own_code(clone):
    where = 'import sys, torchtitan; print(sys.executable, torchtitan.__file__, sep="\\n")'
    done = sourced(clone, f"cd /; python -c '{where}'")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [sys.executable, str(clone / "torchtitan/__init__.py")]
    assert not (clone / ".venv").exists()


def test_an_environment_without_pip_is_used(clone, tmp_path):
    """Such as one that uv made."""
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", fresh], check=True)
    [packages] = fresh.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    stub = packages / "pip"
    stub.mkdir()
    (stub / "__init__.py").touch()  # hides the pip of the path above
    done = subprocess.run(
        [fresh / "bin/python", "scripts/satisfied.py", ""], cwd=clone, check=False
    )
    assert done.returncode == 0


def test_an_environment_without_our_command_is_not_used(clone):
    """Such as one with Meta's distribution `torchtitan`."""
    code = "import runpy, sys, importlib.metadata as m; m.entry_points = lambda **_: (); "
    code += "sys.argv = ['satisfied.py', '']; runpy.run_path('scripts/satisfied.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=clone, check=False)
    assert done.returncode == 1


@pytest.mark.parametrize("requirement", ["torch >= 99", "no-such-package-anywhere"])
def test_an_environment_that_lacks_something_is_not_used(requirement, clone):
    project = clone / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    assert "\ndependencies = [\n" in text
    changed = text.replace("\ndependencies = [\n", f'\ndependencies = [\n    "{requirement}",\n')
    project.write_text(changed, encoding="utf-8")
    done = subprocess.run([sys.executable, "scripts/satisfied.py", ""], cwd=clone, check=False)
    assert done.returncode == 1
