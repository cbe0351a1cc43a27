"""`python -m torchtitan.launch`: `torchtitan train`, for scripts that start a module."""

import sys

from torchtitan.tools.cli import act

if __name__ == "__main__":
    sys.exit(act(["train", *sys.argv[1:]]))
