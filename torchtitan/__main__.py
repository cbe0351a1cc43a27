"""The `torchtitan` command, as `python -m torchtitan`."""

import sys

from torchtitan.tools.cli import main

sys.exit(main())
