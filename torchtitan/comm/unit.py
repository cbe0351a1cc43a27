"""Units that are gathered and reduced together, and the base class of communication methods."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Operation = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "send"]


def sent_bytes(operation: str, size: int, ranks: int) -> float:
    """Return the bytes that each of `ranks` sends in a collective around a ring, or in a message.

    An all-reduce is a reduce-scatter and an all-gather (Patarasuk and Yuan, 2009,
    doi:10.1016/j.jpdc.2008.09.002).

    Args:
        size: bytes of the whole tensor: the output of an all-gather, the input of a reduce-scatter,
            the tensor of an all-reduce or a message.
    """
    if operation == "send":
        return size
    return (2 if operation == "all_reduce" else 1) * size * (ranks - 1) / ranks


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
