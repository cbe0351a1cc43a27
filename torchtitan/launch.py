"""`python -m torchtitan.launch`: `torchtitan train`, for scripts that start a module."""

import sys
from importlib import import_module

if __name__ == "__main__":
    # As a script this is a verb of the command line, which is above this module.
    sys.exit(import_module("torchtitan.tools.cli").act(["train", *sys.argv[1:]]))
