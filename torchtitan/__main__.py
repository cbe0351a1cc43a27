"""The `torchtitan` command, also as `python -m torchtitan`.

Meta's distribution `torchtitan` has the same import name. Installed after this one, it replaces
files of this package, so the command is imported late, and a failure is explained.
"""

import sys
from importlib import import_module

from torchtitan.logging import use_utf8
from torchtitan.packages import DISTRIBUTION, other_torchtitan


def main() -> int:
    """Run the command line; return its exit status."""
    use_utf8()
    try:
        command = import_module("torchtitan.tools.cli")
    except ImportError as error:
        other = other_torchtitan()
        if other is None:
            raise
        print(
            f"error: Meta's torchtitan {other} has replaced files of {DISTRIBUTION}: {error}\n"
            f"Uninstall both, and install {DISTRIBUTION} again: "
            f"pip uninstall torchtitan {DISTRIBUTION}",
            file=sys.stderr,
        )
        return 1
    return int(command.main())


if __name__ == "__main__":
    sys.exit(main())
