"""Units that are gathered and reduced together, and the base class of communication methods."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Operation = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "send"]


class Unit(NamedTuple):
    """Parameters that are gathered together, and whose gradients are reduced together."""

    name: str
    """Name of the module, or of the first of them; "" for parameters of no other unit."""
    shapes: Mapping[str, torch.Size]
    """Shape of one rank's part of each parameter, padded to the first rank's; in a buffer they
    are concatenated in this order."""
    device: torch.device

    @property
    def elements(self) -> int:
        """Elements of one rank's part."""
        return sum(shape.numel() for shape in self.shapes.values())


class Communicator:
    """Communicator, possibly with state from one call to the next."""

    def state(self) -> Mapping[str, Tensor]:
        """Return the state to checkpoint, by name: the live tensors.

        They belong to this rank alone, and start as zeros, also after loading a checkpoint of
        another layout.
        """
        return {}

    def end_step(self) -> None:
        """Finish a step, after its last backward."""
