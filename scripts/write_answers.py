"""Writes what commands answer into the pages that show it.

python scripts/write_answers.py

A block of text that starts with `$ torchtitan ...` is followed by the first lines of the answer: as
many as the block has, or `LINES` if it has none.
"""

import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from torchtitan.tools.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs/plan.md"]
LINES = 5
BLOCK = re.compile(r"^(```text\n)\$ torchtitan (.+)\n((?:(?!```).*\n)*)(```)$", re.MULTILINE)


def written(page: str) -> str:
    """A page with the answers that its commands give now; it is run at the root of the project."""

    def answered(block: re.Match[str]) -> str:
        before, command, shown, after = block.groups()
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()):
            assert main(shlex.split(command)) == 0, command
        lines = printed.getvalue().splitlines()[: shown.count("\n") or LINES]
        return "\n".join([f"{before}$ torchtitan {command}", *lines, after])

    return BLOCK.sub(answered, page)


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(written(each.read_text(encoding="utf-8")), encoding="utf-8")
