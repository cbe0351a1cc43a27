"""What is gathered and reduced together, and what a way to send is while it is at work."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Operation = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "send"]


class Unit(NamedTuple):
    """Parameters that are gathered together, and whose gradients are reduced together."""

    name: str
    """That of a block; "" for all that is in no block."""
    shapes: Mapping[str, torch.Size]
    """Of one rank's part of each parameter, filled up to what the first rank has; in a buffer they
    lie one after the other, in this order."""
    device: torch.device

    @property
    def elements(self) -> int:
        """Of one rank's part."""
        return sum(shape.numel() for shape in self.shapes.values())


class Way:
    """A way to send at work; it may keep a state from one call to the next."""

    def state(self) -> Mapping[str, Tensor]:
        """What of the state a checkpoint has to keep, by name: the live tensors.

        They belong to this rank alone, and are zero at first: that is what they become where a
        checkpoint of another layout is loaded.
        """
        return {}

    def end_step(self) -> None:
        """After the last backward of each step."""
