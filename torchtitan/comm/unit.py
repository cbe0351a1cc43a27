"""What is gathered and reduced together."""

from collections.abc import Mapping
from typing import NamedTuple

import torch


class Unit(NamedTuple):
    """Parameters that are gathered together, and whose gradients are reduced together."""

    name: str
    """That of a block; "" for all that is in no block."""
    shapes: Mapping[str, torch.Size]
    """Of each parameter by name, in the order in which they lie in a buffer; under tensor
    parallelism, of this rank's part. In a buffer each is filled up so that it splits evenly."""
