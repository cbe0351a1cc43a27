"""Gathering of parameters over a shard group: the section `[communication.weights]`."""

from typing import ClassVar, Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm.unit import Communicator, Unit
from torchtitan.config import Config
from torchtitan.torch_private.distributed import all_gather_into


class Gather(Communicator):
    """Communicator that gathers a unit."""

    def __call__(self, whole: Tensor, part: Tensor) -> None:
        """Fill `whole` (ranks * p) with `part` (p) of every rank, in rank order.

        `part` may be a view into `whole`. Parameters with their own format for gathering, such as
        Float8, are passed as bytes (uint8) in both.
        """
        raise NotImplementedError


class PlainGather(Gather):
    """Gathering by an all-gather."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, whole: Tensor, part: Tensor) -> None:
        all_gather_into(whole, part, self.group)


class WeightsConfig(Config):
    """Settings of a gather; `name` picks the subclass."""

    reads_numbers: ClassVar[bool] = False
    """Whether it interprets the values it sends; the others may send bytes."""

    is_exact: ClassVar[bool] = False
    """Whether all ranks receive the owners' values exactly."""

    name: str
    """Method: a key of torchtitan.comm.WEIGHTS."""

    def open(self, unit: Unit, group: ProcessGroup) -> Gather:
        """Open a communicator that gathers `unit` over `group`."""
        raise NotImplementedError


class PlainWeights(WeightsConfig):
    """Parameters are gathered in the dtype of the computation."""

    is_exact: ClassVar[bool] = True

    name: Literal["plain"] = "plain"
    """Method of gathering."""

    def open(self, unit: Unit, group: ProcessGroup) -> Gather:
        return PlainGather(group)
