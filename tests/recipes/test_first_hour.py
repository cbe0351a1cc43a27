"""What a newcomer types first, and what is said to that."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import forked
from torchtitan import __version__
from torchtitan.tools.cli import main

pytestmark = pytest.mark.usefixtures("in_empty_folder")


@pytest.mark.parametrize("flags", [[], ["--job.dump_folder", "run"]])
def test_train_without_a_recipe_offers_one(flags, says):
    assert main(["train", *flags]) == 2
    told = says("train", "--processes", "2", *flags, status=2)
    expected = (
        "error: torchtitan train: got no recipe\n  wanted one, such as the debug recipe, "
        "which trains a small model in minutes: torchtitan train debug_model\n"
        "  use --training.steps N to train the defaults\n"
    )
    assert told == 2 * expected, "the launcher says it too, before it starts anything"
    assert says("check", *flags, status=2) == (
        "error: torchtitan check: got no recipe\n  wanted one, such as the debug recipe, "
        "which trains a small model in minutes: torchtitan check debug_model\n"
        "  use --training.steps N to check the defaults\n"
    )
    assert list(Path().iterdir()) == []


def test_the_debug_recipe_is_named_as_it_can_be_typed(says):
    assert ": torchtitan check debug_model\n" in says("check", status=2)
    assert main(["check", "debug_model"]) == 0


def test_version(capsys):
    python = sys.version.split()[0]
    for word in ("--version", "-V"):
        assert main([word]) == 0
        expected = f"torchtitan {__version__}, torch {version('torch')}, Python {python}\n"
        assert capsys.readouterr().out == expected


def test_help_of_a_section_has_that_section_alone(capsys):
    for about in ("optimizer", "[optimizer]", "lr_scheduler", "convert", "job"):
        assert main(["train", "--help", about]) == 0
        name = about.strip("[]")
        lines = capsys.readouterr().out.splitlines()
        headers = [line for line in lines if line.startswith("╭")]
        assert headers
        assert all(line.strip("╭─ [").startswith(name) for line in headers)
        flags = [line.split()[1] for line in lines if line.startswith("│ --")]
        assert flags
        assert all(flag.startswith(f"--{name}.") for flag in flags)


def test_help_of_one_setting(capsys):
    assert main(["train", "recipe.toml", "--help", "training.seq-len"]) == 0
    flags = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ --")]
    assert [flag.split()[1] for flag in flags] == ["--training.seq_len"]


def test_help_before_a_flag_is_that_of_everything(says):
    whole = says("train", "--help")
    assert says("train", "--help", "--training.steps", "3") == whole


SHELLS = {
    "bash": ("COMP_WORDS", {"COMP_CWORD": "2"}),
    "zsh": ("_TYPER_COMPLETE_ARGS", {}),
    "fish": ("_TYPER_COMPLETE_ARGS", {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
}


def test_shell_completes_verbs_and_settings(tmp_path, monkeypatch):
    def printed(**variables):
        """What the command prints for a shell with this environment."""
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return forked.run(lambda: main([]), tmp_path).stdout

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for shell, (words, more) in SHELLS.items():
        script = printed(_TORCHTITAN_COMPLETE=f"source_{shell}")
        assert "torchtitan" in script
        assert shell in script or shell == "bash"
        ask = {"_TORCHTITAN_COMPLETE": f"complete_{shell}", **more}
        for typed, expected in {
            "torchtitan train --debug.see": "--debug.seed",
            "torchtitan check --data.shuf": "--data.shuffle",
            "torchtitan check --world": "--world-size",
        }.items():
            found = printed(**ask, **{words: typed})
            assert re.search(rf"(^|[\"\s]){expected}", found), (typed, found)
