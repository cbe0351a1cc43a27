"""Writes what commands answer into the pages and recipes that show it.

python scripts/write_answers.py

A block of text that starts with `$ torchtitan ...` is followed by the first lines of the answer: as
many as the block has, or `LINES` if it has none. In a recipe, a comment `$ torchtitan plan ...` is
followed by the lines of `SHOWN`.
"""

import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from torchtitan.tools.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs/plan.md"]
RECIPES = sorted((ROOT / "train_configs").glob("*.toml"))
LINES = 5
SHOWN = ("fits: ", "tokens/s: ")
"""Starts of the lines of a plan that the comment of a recipe has."""
PLAN = re.compile(r"^# \$ torchtitan (plan .+)\n(?:# (?:fits|tokens/s): .*\n)*", re.MULTILINE)
BLOCK = re.compile(r"^(```text\n)\$ torchtitan (.+)\n((?:(?!```).*\n)*)(```)$", re.MULTILINE)


def written(page: str) -> str:
    """A page with the answers that its commands give now; it is run at the root of the project."""

    def answered(block: re.Match[str]) -> str:
        before, command, shown, after = block.groups()
        lines = answer(command)[: shown.count("\n") or LINES]
        return "\n".join([f"{before}$ torchtitan {command}", *lines, after])

    return BLOCK.sub(answered, page)


def planned(recipe: str) -> str:
    """A recipe whose comment has the plans that it shows."""

    def answered(plan: re.Match[str]) -> str:
        told = (line for line in answer(plan[1]) if line.startswith(SHOWN))
        return "".join(f"# {line}\n" for line in (f"$ torchtitan {plan[1]}", *told))

    return PLAN.sub(answered, recipe)


def answer(command: str) -> list[str]:
    """What a command prints."""
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()):
        assert main(shlex.split(command)) == 0, command
    return printed.getvalue().splitlines()


if __name__ == "__main__":
    for write, paths in ((written, PAGES), (planned, RECIPES)):
        for each in paths:
            each.write_text(write(each.read_text(encoding="utf-8")), encoding="utf-8")
