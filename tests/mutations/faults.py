"""The planted faults as data, one table for each round in which they were chosen."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TIERS = ("default", "gate")


class FaultError(Exception):
    """A fault that cannot be planted: the code has changed since it was written."""


@dataclass(frozen=True)
class Fault:
    """Lines of a file, and what they become.

    Attributes:
        file: path from the root of the repository.
        before: whole lines, as they are; they occur in the file exactly once.
        after: the lines in their place.
        breaks: the harm to somebody who trains.
        tier: the tier that must find it: "default", or "gate" (which includes the default tests).
        found_by: the tests that found it last. They are tried first, to save time.
        was_in: the framework and the issue or commit in which others had it.
    """

    name: str
    file: str
    before: str
    after: str
    breaks: str
    tier: str
    round: str
    found_by: tuple[str, ...] = ()
    was_in: str = ""

    def planted(self, source):
        """The source of the file with the fault.

        Raises:
            FaultError: if the lines are not in the file exactly once.
        """
        if (count := source.count(self.before)) != 1:
            found = "are gone from" if not count else f"occur {count} times in"
            raise FaultError(f"{self.name}: the lines of `before` {found} {self.file}")
        return source.replace(self.before, self.after)


def read_faults(folder=FOLDER):
    return [
        Fault(**entry | {"found_by": tuple(entry.get("found_by", ()))}, round=table.stem)
        for table in sorted(folder.glob("*.toml"))
        for entry in tomllib.loads(table.read_text())["fault"]
    ]


def plant(fault, root):
    """Write the fault into a copy of the repository."""
    path = root / fault.file
    if not path.is_file():
        raise FaultError(f"{fault.name}: there is no {fault.file}")
    path.write_text(fault.planted(path.read_text()))
