"""How mistakes are printed: the place and what is wrong, then the fix below it."""

import sys

import pytest

from tests.tables import table
from tests.unit.test_logging import Terminal
from torchtitan.config import ConfigError, RecipeError, print_error, print_message
from torchtitan.config.flags import all_sections
from torchtitan.config.other_names import SYNONYMS
from torchtitan.job import JobConfig

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def test_the_fix_is_below(capsys):
    for message, first, *others in table(__file__, "reports.txt"):
        print_error(ConfigError(message))
        below = [line.replace("- ", "  ", 1) for line in others]
        assert capsys.readouterr().err.splitlines() == [f"error: {first}", *below]


def test_each_mistake_is_an_error_and_each_notice_a_note(capsys):
    print_error(RecipeError(["a: is not b:", "  more", "c: got 1; use 2"], ["old: is now new"]))
    assert capsys.readouterr().err == (
        "note: old: is now new\nerror: a: is not b:\n  more\nerror: c: got 1\n  use 2\n"
    )


@pytest.mark.parametrize(("variable", "is_red"), [("", True), ("1", False)])
def test_the_level_is_in_color_on_a_terminal(variable, is_red, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", variable)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    print_message("error", "x: got 1; use 2")
    level = "\033[1;31merror:\033[0m" if is_red else "error:"
    assert terminal.getvalue() == f"{level} x: got 1\n  use 2\n"


def test_the_names_of_other_software_stand_for_settings_that_exist():
    known = {entry.path for section in all_sections(JobConfig) for entry in section.entries}
    assert {ours for ours in SYNONYMS.values() if not ours.startswith("--")} <= known
    own = {key.rpartition(".")[2] for key in known}
    assert not {name for name, ours in SYNONYMS.items() if name in own and "." in ours}


@pytest.mark.parametrize(
    ("flags", "started", "needed", "processes"),
    [
        ("--parallelism.tensor_parallel_degree 2", 1, "2 processes", 2),
        ("--parallelism.tensor_parallel_degree 2", 5, "a multiple of 2 processes", 4),
        ("--parallelism.data_parallel_replicate_degree 3", 2, "3 processes", 3),
        ("--parallelism.data_parallel_shard_degree 4", 1, "4 processes", 4),
        ("--parallelism.data_parallel_shard_degree 1", 2, "1 process", 1),
    ],
)
def test_a_layout_for_other_ranks_says_how_to_start_them(flags, started, needed, processes, says):
    ranks = [f"--processes={started}"] if started > 1 else []
    told = says("train", *ranks, "--training.steps", "500", *flags.split(), status=2)
    assert told.startswith(f"error: {flags.split()[0]}: got {flags.split()[1]}; ")
    assert f" this layout needs {needed} (" in told
    assert f"and this run has {started}\n" in told
    assert f"  start them: torchtitan train RECIPE --processes {processes}\n" in told
