"""How the ranks of a shard group gather parameters: the section `[communication.weights]`."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm.unit import Unit, Way
from torchtitan.config import Config
from torchtitan.torch_private.collectives import all_gather_into


class Gather(Way):
    """Gathers a unit."""

    def __call__(self, whole: Tensor, part: Tensor) -> None:
        """Fill `whole` (ranks * p) with `part` (p) of every rank, in rank order.

        `part` may be a view into `whole`. Where a parameter says in what form it is gathered, as
        those in Float8 do, both hold its bytes (uint8).
        """
        raise NotImplementedError


class PlainGather(Gather):
    """By an all-gather."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, whole: Tensor, part: Tensor) -> None:
        all_gather_into(whole, part, self.group)


class WeightsConfig(Config):
    """Settings of a way to gather; `name` picks the subclass."""

    reads_numbers: ClassVar[bool] = False
    """Whether it makes sense of what it sends, which may be bytes for all others."""

    is_exact: ClassVar[bool] = False
    """Whether all ranks have what the owners have."""

    name: str = Field(description="Which way: a key of torchtitan.comm.WEIGHTS.")

    def open(self, unit: Unit, group: ProcessGroup) -> Gather:
        """What gathers `unit` over `group`."""
        raise NotImplementedError

    def sent_bytes(self, unit: Unit, ranks: int, dtype: torch.dtype) -> int:
        """Bytes of the whole of a unit in `dtype`, as it is gathered over `ranks`."""
        raise NotImplementedError(f"there are no formulas of what {self.name} sends")


class PlainWeights(WeightsConfig):
    """Parameters are gathered as they are computed with."""

    is_exact: ClassVar[bool] = True

    name: Literal["plain"] = Field("plain", description="Which way to gather.")

    def open(self, unit: Unit, group: ProcessGroup) -> Gather:
        return PlainGather(group)

    def sent_bytes(self, unit: Unit, ranks: int, dtype: torch.dtype) -> int:
        return ranks * unit.elements * dtype.itemsize
