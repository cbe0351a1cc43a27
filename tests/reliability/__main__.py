"""Makes all reliability trials, and writes what came out into a page of results.

python -m tests.reliability [arguments of pytest]
"""

import os
import platform
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.reliability.conftest import PROPERTY, Row
from torchtitan import __version__
from torchtitan.device import Device

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "benchmarks/results/reliability.md"


class Outcomes:
    """A plugin of pytest that collects what the trials tell."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped.append(report.nodeid)
        elif report.when == "call":
            self.rows += [Row(*row) for name, row in report.user_properties if name == PROPERTY]

    def text(self, seconds: float) -> str:
        """The table, with what it is of."""
        numbers: dict[tuple[str, str, str], int] = {}
        for trial, expected, outcome, number in self.rows:
            key = (trial, expected, outcome)
            numbers[key] = numbers.get(key, 0) + number
        lines = ["| trial | number | expected | outcome |", "|---|---|---|---|"]
        lines += [
            f"| {trial} | {number} | {expected} | {outcome} |"
            for (trial, expected, outcome), number in sorted(numbers.items(), key=_place)
        ]
        lines += [f"| `{name}` | 1 | see there | **failed** |" for name in self.failed]
        about = (
            f"{sum(numbers.values())} trials, of which {len(self.failed)} failed and "
            f"{len(self.skipped)} could not be made, in {seconds / 60:.0f} minutes on "
            f"{machine()} Every random choice has its seed in the trial."
        )
        return "\n".join([about, "", *lines]) + "\n"


def machine() -> str:
    """When and where this is, as a sentence's end."""
    memory = Device("cpu").memory_capacity()
    return (
        f"{time.strftime('%d %B %Y')}: {Device('cpu').name}, {os.cpu_count()} cores, "
        f"{memory:.0f} GiB; {platform.system()} {platform.release().split('-')[0]}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, torchtitan "
        f"{__version__}."
    )


def write_table(page: Path, name: str, text: str) -> None:
    """Replace what stands in a page between the marks of that name."""
    place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- END -->)", re.DOTALL)
    found, count = place.subn(lambda match: text, page.read_text(encoding="utf-8"), count=1)
    assert count == 1, f"{page} has no place for the table {name}"
    page.write_text(found, encoding="utf-8")


def _place(item: tuple[tuple[str, str, str], int]) -> tuple[str, str]:
    (trial, expected, _), _ = item
    return expected, trial


def main() -> int:
    """Run all trials; returns the exit status of pytest."""
    outcomes, began = Outcomes(), time.monotonic()
    # The long run takes hours, and has a table of its own.
    words = ["-q", "-m", "slow or not slow", str(FOLDER), f"--ignore={FOLDER / 'test_soak.py'}"]
    words += sys.argv[1:]
    status = pytest.main(words, plugins=[outcomes])
    if outcomes.rows and "-k" not in words:
        write_table(PAGE, "TABLE", outcomes.text(time.monotonic() - began))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
