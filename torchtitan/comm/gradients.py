"""How the ranks of a shard group add up gradients: the section `[communication.gradients]`."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm.unit import Unit, Way
from torchtitan.config import Config
from torchtitan.torch_private.collectives import reduce_scatter_into


class Reduce(Way):
    """Reduces the gradients of a unit."""

    def __call__(self, part: Tensor, whole: Tensor) -> None:
        """Fill `part` (p) with this rank's row of the sum over all ranks of `whole` (ranks * p).

        It is called for every microbatch. What is added up are shares of the gradient of a global
        mean: nothing is to be divided.
        """
        raise NotImplementedError


class PlainReduce(Reduce):
    """By a reduce-scatter."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, part: Tensor, whole: Tensor) -> None:
        reduce_scatter_into(part, whole, self.group)


class GradientsConfig(Config):
    """Settings of a way to reduce; `name` picks the subclass."""

    operation: ClassVar[Literal["reduce_scatter", "all_to_all"]] = "reduce_scatter"
    """The collective that it is made of."""
    remembers: ClassVar[bool] = False
    """Whether gradients that nobody uses would change those of later steps."""

    is_exact: ClassVar[bool] = False
    """Whether it gives the sum of what ranks have."""

    name: str = Field(description="Which way: a key of torchtitan.comm.GRADIENTS.")

    def open(self, unit: Unit, group: ProcessGroup) -> Reduce:
        """What reduces the gradients of `unit` over `group`."""
        raise NotImplementedError

    def sent_bytes(self, unit: Unit, ranks: int, dtype: torch.dtype) -> int:
        """Bytes of the whole of a unit in `dtype`, as it is reduced over `ranks`."""
        raise NotImplementedError(f"there are no formulas of what {self.name} sends")


class PlainGradients(GradientsConfig):
    """Gradients are added up in training.mixed_precision_reduce."""

    is_exact: ClassVar[bool] = True

    name: Literal["plain"] = Field("plain", description="Which way to reduce.")

    def open(self, unit: Unit, group: ProcessGroup) -> Reduce:
        return PlainReduce(group)

    def sent_bytes(self, unit: Unit, ranks: int, dtype: torch.dtype) -> int:
        return ranks * unit.elements * dtype.itemsize
