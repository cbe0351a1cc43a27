"""Exit status 0 if this interpreter has torchtitan from this checkout and all that it requires."""

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

# The interpreter may have nothing installed but pip, which brings this library along.
from pip._vendor.packaging.requirements import Requirement


def is_satisfied(extras: str) -> bool:
    root = Path(__file__).resolve().parent.parent
    project = distribution("torchtitan")
    if root.as_uri() not in (project.read_text("direct_url.json") or ""):
        return False
    for line in project.requires or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": extras.strip("[]")}):
            found = distribution(requirement.name).version
            if not requirement.specifier.contains(found, prereleases=True):
                return False
    return True


try:
    sys.exit(not is_satisfied(sys.argv[1]))
except PackageNotFoundError:
    sys.exit(1)
