"""`python -m torchtitan.train`: `torchtitan train`, for torchrun."""

import sys

from torchtitan.logging import use_utf8
from torchtitan.tools.cli import act

if __name__ == "__main__":
    use_utf8()
    sys.exit(act(["train", *sys.argv[1:]]))
