"""Exit status 0 if this interpreter has all that this checkout requires, and its command.

The command may be of another checkout, under any distribution name: `environment.sh` has the code
of this one come first. Meta's distribution `torchtitan` has no such command.
"""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ModuleNotFoundError:  # it is required, too
    sys.exit(1)


def is_satisfied(extras: str) -> bool:
    root = Path(__file__).resolve().parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if not entry_points(group="console_scripts", name="torchtitan"):
        return False
    wanted = list(project["dependencies"])
    if extra := extras.strip("[]"):
        wanted += project["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate():
            found = distribution(requirement.name).version
            if not requirement.specifier.contains(found, prereleases=True):
                return False
    return True


try:
    sys.exit(not is_satisfied(sys.argv[1]))
except PackageNotFoundError:
    sys.exit(1)
