"""Hints to install a package, and the other distribution called torchtitan."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from torchtitan import packages
from torchtitan.tools.cli import main

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ALL = {*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())}


def test_a_hint_has_the_versions_that_work():
    for requirement in sorted(ALL):
        name = re.split("[<>=[]", requirement)[0]
        bounds = requirement.removeprefix(name).partition("]")[2] or requirement.removeprefix(name)
        assert packages.install(name) == f'pip install "{name}{bounds}"'
    assert packages.install("adlfs") == "pip install adlfs"


def test_nothing_is_installed_under_the_name_of_the_other_project():
    """Nor under ours, which no index has."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").iterdir()]
    for path in [*pages, *(ROOT / "torchtitan").rglob("*.py"), *ROOT.glob("*.sh")]:
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"torchtitan(-pretrain)?\[", text), path
            for command in re.findall(r"pip install[^`\n]*torchtitan.*", text):
                assert "another project" in command or "uninstall" in command, f"{path}: {command}"


def test_commands_in_pages_have_the_same_versions():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "Dockerfile"]:
        text = path.read_text(encoding="utf-8")
        for name, versions in re.findall(r'"([\w-]+)([<>][^"]*)"', text):
            assert packages.install(name) == f'pip install "{name}{versions}"', path


def add_distribution(folder, entry_points):
    info = folder / "torchtitan-0.3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: torchtitan\nVersion: 0.3.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")


@pytest.fixture
def other_distribution(tmp_path, monkeypatch):
    """An environment with Meta's distribution, in which nothing has warned of it yet."""
    packages.warn_of_other.cache_clear()
    add_distribution(tmp_path, "")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    packages.warn_of_other.cache_clear()


def test_the_other_distribution_is_reported_once(other_distribution, capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().err == ""
    for count in (1, 0):
        assert main(["recipes"]) == 0
        told = capsys.readouterr().err
        assert told.count("WARNING Meta's torchtitan 0.3.0 is installed") == count
        assert told.count(f"the files in {packages.PACKAGE} are used") == count


def test_a_run_reports_it(other_distribution, capsys):
    words = ["train", "debug_model", "--training.steps", "1", "--training.seq_len", "16"]
    assert main([*words, "--validation.no-enable", "--checkpoint.no-enable"]) == 0
    assert capsys.readouterr().err.count("Meta's torchtitan 0.3.0") == 1


def test_an_installation_under_the_former_name_is_ours(tmp_path, monkeypatch):
    add_distribution(tmp_path, "[console_scripts]\ntorchtitan = torchtitan.tools.cli:main\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert packages.other_torchtitan() is None
