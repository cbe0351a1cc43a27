"""Reduction of gradients over a shard group: the section `[communication.gradients]`."""

from typing import ClassVar, Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm.unit import Communicator, Unit
from torchtitan.config import Config
from torchtitan.torch_private.distributed import reduce_scatter_into


class Reduce(Communicator):
    """Reducer of the gradients of a unit."""

    def __call__(self, part: Tensor, whole: Tensor) -> None:
        """Fill `part` (p) with this rank's row of the sum over all ranks of `whole` (ranks * p).

        It is called for every microbatch. The summands are shares of the gradient of a global mean,
        so nothing is divided.
        """
        raise NotImplementedError


class PlainReduce(Reduce):
    """Reducer that uses a reduce-scatter."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, part: Tensor, whole: Tensor) -> None:
        reduce_scatter_into(part, whole, self.group)


class GradientsConfig(Config):
    """Settings of a reducer; `name` picks the subclass."""

    remembers: ClassVar[bool] = False
    """Whether unused gradients would change those of later steps."""

    is_exact: ClassVar[bool] = False
    """Whether it returns the exact sum over ranks."""

    name: str
    """Method: a key of torchtitan.comm.GRADIENTS."""

    def open(self, unit: Unit, group: ProcessGroup) -> Reduce:
        """Open a reducer for the gradients of `unit` over `group`."""
        raise NotImplementedError


class PlainGradients(GradientsConfig):
    """Gradients are summed in training.mixed_precision_reduce."""

    is_exact: ClassVar[bool] = True

    name: Literal["plain"] = "plain"
    """Method of reduction."""

    def open(self, unit: Unit, group: ProcessGroup) -> Reduce:
        return PlainReduce(group)
