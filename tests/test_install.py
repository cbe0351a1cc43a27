"""The distribution: its metadata, and a wheel, an sdist and an image outside the clone."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETUP = runpy.run_path(str(ROOT / "setup.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)]*)\)")
BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)
"""Builds as pip would, in this environment."""
NOT_IN_SDIST = {".gitignore", ".dockerignore"}


def test_the_long_description_has_no_relative_link():
    texts = re.findall(r"\[([^\]]+)\]\((?!https://)", README)
    assert texts
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for home in ("", project["tool"]["torchtitan"]["home"]):
        text = SETUP["long_description"](README, home)
        assert all(target.startswith("https://") for target in LINK.findall(text))
        assert [words for words in texts if words not in text] == []


def test_its_links_are_absolute_with_a_home():
    home = "https://example.org/owner/repository"
    relative = [target for target in LINK.findall(README) if not target.startswith("https://")]
    absolute = [
        target
        for target in LINK.findall(SETUP["long_description"](README, home))
        if target.startswith(home)
    ]
    assert len(absolute) == len(relative) > 10
    for target in absolute:
        name = re.sub(rf"{home}/(blob|raw)/HEAD/|#.*", "", target)
        assert (ROOT / name).is_file(), target
    assert f"{home}/raw/HEAD/docs/images/debug_loss.svg" in absolute
    assert f"{home}/blob/HEAD/README.md#limitations" in absolute


def run(*command, cwd, path="", status=0):
    """Run a command without the clone on PYTHONPATH; return what it wrote."""
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if not path:
        del environment["PYTHONPATH"]
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True
    )
    told = done.stdout if status == 0 else done.stderr
    assert done.returncode == status, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return told


def copy_of_files(folder):
    """Copy the files that belong to the repository; without git, all that may."""
    if (ROOT / ".git").exists():
        listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
        names = [name for name in listed.splitlines() if (ROOT / name).is_file()]
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        return names
    ignored = shutil.ignore_patterns(".venv", "outputs", "__pycache__", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    return []


@pytest.fixture
def build(tmp_path):
    """Builds what `build_meta` calls so, and returns the file."""
    source, dist = tmp_path / "source", tmp_path / "dist"
    copy_of_files(source)
    dist.mkdir()

    def built(kind):
        run(sys.executable, "-c", BUILD, f"build_{kind}", dist, cwd=source)
        [file] = dist.iterdir()
        return file

    return built


VERBS = """
import contextlib, io, json
from torchtitan.tools.cli import main
for words in (
    "check llama3_8b.toml --model.tokenizer_path none",
    "compare studies/fsdp_debug.toml --check",
    "recipes copy research/loco",
    "help quickstart",
    "check research/loco.toml --world-size 2",
    "train debug_model --training.steps 2 --validation.steps 1",
):
    assert main(words.split()) == 0, words
with contextlib.redirect_stdout(io.StringIO()) as told:
    assert main(["doctor", "--json"]) == 0
print(json.dumps(json.loads(told.getvalue())))
"""
"""In one process: importing torch takes most of the time of each."""


@pytest.mark.gate
def test_a_wheel_trains_outside_the_clone(build, tmp_path):
    fresh, folder = tmp_path / "fresh", tmp_path / "folder"
    folder.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", fresh, cwd=tmp_path)
    python, command = fresh / "bin/python", fresh / "bin/torchtitan"
    # A path in a .pth file brings the dependencies, but not an editable install: the .pth files in
    # that folder are not read.
    [packages] = fresh.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    wheel = build("wheel")
    with zipfile.ZipFile(wheel) as archive:
        others = [name for name in archive.namelist() if not name.endswith((".py", ".toml"))]
    kept = ("py.typed", "tools/reference.json", "tools/page.css")
    several = (r"cluster/manifests/\w+\.\w+", r"(pages|research)/\w+\.md")
    ours = f"torchtitan/({'|'.join((*map(re.escape, kept), *several))})"
    expected = rf"{ours}|torchtitan_pretrain.*dist-info/.*"
    assert [name for name in others if not re.fullmatch(expected, name)] == []
    manifests = (ROOT / "torchtitan/cluster/manifests").iterdir()
    shipped = {f"torchtitan/cluster/manifests/{path.name}" for path in manifests}
    shipped |= {"torchtitan/tools/page.css", "torchtitan/tools/reference.json"}
    assert shipped <= {*others}
    run(*pip, "--no-deps", "--no-index", wheel, cwd=folder)

    assert (packages / "torchtitan/py.typed").is_file()
    listed = run(command, "recipes", cwd=folder)
    assert {line.split()[0] for line in listed.splitlines() if line} >= {
        *("debug_model", "llama3_8b", "research/loco", "studies/fsdp_debug")
    }
    told = run(python, "-c", VERBS, cwd=folder)
    assert "8,030,261,248 parameters" in told
    rows = (folder / "outputs/debug_model/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert max(json.loads(row)["step"] for row in rows) == 2
    found = json.loads(told.splitlines()[-1])
    assert f"in {packages / 'torchtitan'}" in found[1]["detail"]

    other = packages / "torchtitan-0.3.0.dist-info/METADATA"
    other.parent.mkdir()
    other.write_text("Name: torchtitan\nVersion: 0.3.0\n", encoding="utf-8")
    (packages / "torchtitan/config/__init__.py").write_text("import no_such_module\n")
    told = run(command, "recipes", cwd=folder, status=1)
    assert told.startswith("error: Meta's torchtitan 0.3.0 has replaced files of torchtitan-")


@pytest.mark.slow
def test_an_sdist_has_all_files_and_passes_its_own_tests(build, tmp_path):
    with tarfile.open(build("sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.glob("torchtitan_pretrain-*")
    if (ROOT / ".git").exists():
        expected = set(copy_of_files(tmp_path / "again"))
        files = {
            path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()
        }
        assert expected - files == NOT_IN_SDIST
        extra = {name for name in files - expected if ".egg-info/" not in name}
        assert extra == {"PKG-INFO", "setup.cfg"}
    tests = ("tests/recipes/test_packaged.py", "tests/unit/test_packages.py", "tests/test_words.py")
    quickstart = "tests/test_docs.py::test_blocks_of_a_page_do_what_it_says[quickstart.md]"
    pytest_command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    told = run(*pytest_command, *tests, quickstart, cwd=unpacked, path=str(unpacked))
    assert " passed" in told


def docker_lacks():
    """Why there is no Docker, if there is none."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    done = subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False)
    return "there is no Docker daemon" if done.returncode else ""


@pytest.mark.gate
def test_the_image_has_the_command(tmp_path):
    if lack := docker_lacks():
        pytest.skip(lack)
    index = ("--build-arg", "TORCH_INDEX=https://download.pytorch.org/whl/cpu")
    run("docker", "build", "--quiet", "--tag", "torchtitan-test", *index, ".", cwd=ROOT)
    told = run("docker", "run", "--rm", "torchtitan-test", "doctor", cwd=tmp_path)
    assert "  ok       torch " in told
