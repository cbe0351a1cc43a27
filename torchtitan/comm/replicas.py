"""How copies of the model agree: the section `[communication.replicas]`.

They agree on gradients in each step. Or, with `every` = n, each makes updates by its own gradients,
and after every n-th they agree on how far their weights have moved since the last agreement; where
all of it is sent, that is the mean of their weights (local SGD; Stich, 2019, arXiv:1805.09767).
"""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm.unit import Operation, Unit, Way
from torchtitan.config import Config


class Agree(Way):
    """Lets copies of the model agree."""

    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        """Change the gradients to what the copies agree on, in place: a sum over them.

        It is called once a step, after the last backward and before the norm is taken, with what
        this rank has of the gradient of each parameter, by name; all copies have the same parts.
        Where copies run apart, it is called at each agreement, with the copy's share of the mean
        movement of each parameter.
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

    name: str = Field(description="Which way: a key of torchtitan.comm.REPLICAS.")

    @property
    def in_backward(self) -> bool:
        """Whether all gradients are added up in the backward, by what shards the model.

        Then `open` is not asked.
        """
        return False

    @property
    def is_exact(self) -> bool:
        """Whether replicas train the run of one of them on the samples of all."""
        return False

    @property
    def steps_apart(self) -> int | None:
        """Updates that a copy makes by itself before it agrees with the others: n; None: never."""
        return 1

    @property
    def runs_apart(self) -> bool:
        """Whether weights differ between copies, if only for some steps."""
        return self.steps_apart != 1

    @property
    def steps_verified(self) -> int:
        """Steps between comparisons of the weights of copies; 0: never."""
        return 0

    def open(self, unit: Unit, group: ProcessGroup) -> Agree:
        """What agrees over `group`, each rank of which has another copy.

        Args:
            unit: what this rank has of all parameters.
        """
        raise NotImplementedError

    def messages(self, unit: Unit, ranks: int, dtype: torch.dtype) -> list[tuple[Operation, int]]:
        """Each message of a step in which they agree, with the bytes of the whole, for gradients in
        `dtype`."""
        raise NotImplementedError(f"there are no formulas of what {self.name} sends")


class Agreement(ReplicasConfig):
    """Settings of all ways to agree."""

    every: int = Field(
        1,
        ge=1,
        description="1: agree on each step's gradients; n: each replica makes updates of its own, "
        "and after every n-th they agree on how far their weights have moved.",
    )
    verify_steps: int = Field(
        100, ge=0, description="Steps between comparisons of the replicas' weights; 0: never."
    )

    @property
    def steps_apart(self) -> int | None:
        return self.every

    @property
    def steps_verified(self) -> int:
        return self.verify_steps


class AllReduce(Agreement):
    """Gradients are added up; or, with `every`, weights are averaged."""

    name: Literal["all_reduce"] = Field("all_reduce", description="Which way to agree.")
    overlap: bool = Field(
        True,
        description="Add gradients up in the backward, as soon as those of a block are complete; "
        "false: after it.",
    )
    verify_steps: int = Field(
        0, ge=0, description="Steps between comparisons of the replicas' weights; 0: never."
    )

    @property
    def is_exact(self) -> bool:
        return self.every == 1

    @property
    def in_backward(self) -> bool:
        return self.overlap and self.every == 1

    def open(self, unit: Unit, group: ProcessGroup) -> Agree:
        return AddUp(group)

    def messages(self, unit: Unit, ranks: int, dtype: torch.dtype) -> list[tuple[Operation, int]]:
        size = 4 if self.runs_apart else dtype.itemsize  # weights move in float32
        return [("all_reduce", shape.numel() * size) for shape in unit.shapes.values()]


class Nothing(ReplicasConfig):
    """Replicas never agree: each trains a model of its own."""

    name: Literal["none"] = Field("none", description="Which way to agree.")

    @property
    def steps_apart(self) -> int | None:
        return None

    def messages(self, unit: Unit, ranks: int, dtype: torch.dtype) -> list[tuple[Operation, int]]:
        return []
