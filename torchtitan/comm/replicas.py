"""How copies of the model agree on gradients: the section `[communication.replicas]`."""

from collections.abc import Mapping
from functools import partial
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.config import Config


class Agree(Protocol):
    """Lets copies agree; may keep a state from one step to the next."""

    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        """Change the gradients to what the copies agree on, in place.

        It is called once a step, after the last backward and before the norm is taken, with what
        this rank has of the gradient of each parameter, by name; all copies have the same parts.
        """


class ReplicasConfig(Config):
    """Settings of a way to agree; `name` picks the subclass."""

    name: str = Field(description="Which way: a key of torchtitan.comm.REPLICAS.")

    @property
    def in_backward(self) -> bool:
        """Whether all gradients are added up in the backward, by what shards the model.

        Then `open` is not asked.
        """
        return False

    def open(self, group: ProcessGroup) -> Agree:
        """What agrees over `group`, each rank of which has another copy."""
        raise NotImplementedError

    def sent_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Bytes of `elements` of a gradient, as they are sent by `open`'s."""
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

    def open(self, group: ProcessGroup) -> Agree:
        return partial(_add_up, group=group)

    def sent_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements * dtype.itemsize


def _add_up(gradients: Mapping[str, Tensor], group: ProcessGroup) -> None:
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=group)
