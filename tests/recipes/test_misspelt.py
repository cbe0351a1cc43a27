"""A misspelt option of any verb is answered with the one that was meant."""

from importlib import import_module
from unittest.mock import Mock, call

import pytest
from typer.main import get_command

from torchtitan.cluster import launcher
from torchtitan.cluster.launcher import LaunchOptions
from torchtitan.tools.cli import main, verbs


def commands(words, command):
    """A verb, or each that is within it."""
    if inside := getattr(command, "commands", None):
        for name, inner in inside.items():
            yield from commands([*words, name], inner)
    else:
        yield words, command


def options():
    """Every long option of every verb."""
    found = []
    for modules in verbs().values():
        for name, module in modules.items():
            app = get_command(import_module(module).app)
            for words, command in commands([name], app):
                for parameter in command.params:
                    names = [*parameter.opts, *getattr(parameter, "secondary_opts", ())]
                    found += [(tuple(words), n) for n in names if n.startswith("--") and len(n) > 4]
    return found


def misspelt(option):
    """Ways in which fingers err."""
    middle = 2 + (len(option) - 2) // 2
    swapped = option[: middle - 1] + option[middle] + option[middle - 1] + option[middle + 1 :]
    forms = [option[:middle] + option[middle + 1 :], swapped, option + option[-1]]
    if "-" in option[2:]:
        forms.append("--" + option[2:].replace("-", "_"))
    return [form for form in forms if form != option and len(form) > 5]


@pytest.mark.costs("every option of every verb")
def test_the_option_that_was_meant_is_named(capsys):
    known, missed = options(), []
    for words, option in known:
        for number, wrong in enumerate(misspelt(option)):
            if (words, wrong) in known:
                continue
            status = main([*words, *([wrong, "2"] if number % 2 else [f"{wrong}=2"])])
            message = capsys.readouterr().err
            if status != 2 or option not in message:
                missed.append(f"{' '.join(words)} {wrong}, status {status}: {message}")
    assert not missed, "\n".join(missed)


def test_the_launcher_takes_its_options_and_the_recipe_in_any_order(monkeypatch):
    start = Mock(return_value=0)
    monkeypatch.setattr(launcher, "start", start)
    for at in range(3):
        words = [["--training.steps", "3"], ["--no-data.shuffle"]]
        words.insert(at, ["--processes", "2", "r.toml"])
        assert main(["train", *(word for group in words for word in group)]) == 0
    flags = ["--training.steps", "3", "--no-data.shuffle"]
    assert start.call_args_list == 3 * [call(LaunchOptions(processes=2), ["r.toml", *flags])]
