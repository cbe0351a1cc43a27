"""How copies of the model agree on gradients: the section `[communication.replicas]`."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm.unit import Unit, Way
from torchtitan.config import Config


class Agree(Way):
    """Lets copies of the model agree."""

    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        """Change the gradients to what the copies agree on, in place.

        It is called once a step, after the last backward and before the norm is taken, with what
        this rank has of the gradient of each parameter, by name; all copies have the same parts.
        """
        raise NotImplementedError


class AddUp(Agree):
    """By an all-reduce of each."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=self.group)


class ReplicasConfig(Config):
    """Settings of a way to agree; `name` picks the subclass."""

    operation: ClassVar[Literal["all_reduce", "all_gather"]] = "all_reduce"
    """The collective that it is made of."""

    name: str = Field(description="Which way: a key of torchtitan.comm.REPLICAS.")

    @property
    def in_backward(self) -> bool:
        """Whether all gradients are added up in the backward, by what shards the model.

        Then `open` is not asked.
        """
        return False

    @property
    def gives_signs(self) -> bool:
        """Whether gradients become signs, of which the norm says nothing."""
        return False

    def open(self, unit: Unit, group: ProcessGroup) -> Agree:
        """What agrees over `group`, each rank of which has another copy.

        Args:
            unit: what this rank has of all parameters.
        """
        raise NotImplementedError

    def messages(self, unit: Unit, ranks: int, dtype: torch.dtype) -> list[int]:
        """Bytes of the whole of each message of a step, for gradients in `dtype`."""
        raise NotImplementedError(f"there are no formulas of what {self.name} sends")


class AllReduce(ReplicasConfig):
    """Gradients are added up."""

    name: Literal["all_reduce"] = Field("all_reduce", description="Which way to agree.")
    overlap: bool = Field(
        True,
        description="Add them up in the backward, as soon as those of a block are complete; "
        "false: after it.",
    )

    @property
    def in_backward(self) -> bool:
        return self.overlap

    def open(self, unit: Unit, group: ProcessGroup) -> Agree:
        return AddUp(group)

    def messages(self, unit: Unit, ranks: int, dtype: torch.dtype) -> list[int]:
        return [shape.numel() * dtype.itemsize for shape in unit.shapes.values()]
